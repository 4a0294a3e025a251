"""Reads the cluster file: targets, draft nodes, router, placement and scaling."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from foreword.cluster.address import NodeAddress
from foreword.cluster.pools.members import (
    NODE,
    NODES_LIST,
    ROUTER,
    TARGET,
    TARGETS_LIST,
    Member,
    replica_number,
)
from foreword.cluster.pools.scaling import ScaleRule
from foreword.cluster.settings import entries
from foreword.errors import RequestError

_PLACE_KEYS = ("cpus", "gpus")
_NODE_KEYS = ("name", "model", "listen", "method", "options", "labels", "capacity", "args", *_PLACE_KEYS)
_TARGET_KEYS = ("name", "model", "host", "port", "drafters", "labels", "args", "near", "strict", *_PLACE_KEYS)
_ROUTER_KEYS = ("host", "port", "args", *_PLACE_KEYS)
_SCALE_KEYS = tuple(field.name for field in fields(ScaleRule))


@dataclass(frozen=True)
class RaySettings:
    """Settings of Ray."""

    address: str = ""  # of a running Ray; empty: start one
    namespace: str = "foreword"


@dataclass(frozen=True)
class ClusterConfig:
    """Contents of the cluster file."""

    members: list[Member]  # draft nodes first
    ray: RaySettings | None = None
    scale: ScaleRule | None = None

    def member(self, name: str) -> Member:
        return next(one for one in self.members if one.name == name)

    @property
    def room(self) -> float:
        """CPUs of all members, including those that may be added."""
        added = 0.0 if self.scale is None else (self.scale.most - 1) * self.member(self.scale.node).cpus
        return sum(one.cpus for one in self.members) + added


class NodeChoice:
    """Selects the nodes of a target: all, or those that it names."""

    def __init__(self, nodes: Sequence[Member], scale: ScaleRule | None, *, is_listed: bool) -> None:
        """`is_listed`: nodes come and go, so targets read their addresses from a file."""
        self._nodes = {node.name: node for node in nodes}
        self._scale = scale
        self._is_listed = is_listed

    def by(self, given: Mapping[str, Any], place: str) -> tuple[str, tuple[str, ...]]:
        """Return a target's `--drafters`, and the named nodes if not all."""
        if "drafters" not in given:
            return self._all(), ()
        value = given["drafters"]
        if isinstance(value, str) and value.startswith("@"):
            return value, ()
        is_list = isinstance(value, list)
        named = names_of(given, "drafters", place) if is_list else entries(text_of(given, "drafters", place))
        for one in named:
            self._check(one, place)
        if self._is_listed and any(one in self._nodes for one in named):
            return NODES_LIST, tuple(name for one in named for name in self._replicas(one))
        return ",".join(self._address(one) for one in named), ()

    def _all(self) -> str:
        if self._is_listed and self._nodes:
            return NODES_LIST
        return ",".join(node.address for node in self._nodes.values())

    def _address(self, one: str) -> str:
        return self._nodes[one].address if one in self._nodes else one

    def _replicas(self, one: str) -> list[str]:
        """Return all possible replicas of a scaled node."""
        if self._scale is None or one != self._scale.node:
            return [one]
        return [self._nodes[one].replica(number).name for number in range(1, self._scale.most + 1)]

    def _check(self, one: str, place: str) -> None:
        if one in self._nodes:
            return
        try:
            NodeAddress.parse(one)
        except RequestError:
            known = ", ".join(self._nodes) or "none"
            raise RequestError(
                f"cluster file: {place}.drafters has {one!r}, which is neither one of the nodes ({known}) "
                "nor an address (HOST:PORT or unix:/PATH)"
            ) from None


def read_cluster(path: Path) -> ClusterConfig:
    """Read and check the cluster file."""
    given = mapping_of(_read(path), "the file", ("nodes", "targets", "router", "ray", "autoscale"))
    nodes = [_node(one, f"nodes[{place}]") for place, one in enumerate(list_of(given, "nodes"))]
    scale = _scale(given["autoscale"], nodes) if "autoscale" in given else None
    ray = _ray(given["ray"]) if "ray" in given else None
    comes_and_goes = ray is not None or scale is not None
    listed = list_of(given, "targets")
    choice = NodeChoice(nodes, scale, is_listed=comes_and_goes)
    targets = [_target(one, f"targets[{place}]", choice) for place, one in enumerate(listed)]
    members = [*nodes, *targets]
    if "router" in given:
        behind = [TARGETS_LIST] if ray is not None else [member.address for member in targets]
        members.append(_router(given["router"], behind))
    _check(members)
    if ray is None:
        _check_addresses(members)
    return ClusterConfig(members, ray, scale)


def _check(members: Sequence[Member]) -> None:
    names = [member.name for member in members]
    if len(set(names)) != len(names):
        raise RequestError(f"cluster file: two members have the same name; there are {', '.join(names)}")
    if not any(member.kind != ROUTER for member in members):
        raise RequestError("cluster file: it has neither nodes nor targets")
    if members[-1].kind == ROUTER and not any(member.is_target for member in members):
        raise RequestError("cluster file: a router needs targets")
    nodes = {member.name for member in members if member.kind == NODE}
    paired: set[str] = set()
    for member in members:
        for name in member.near:
            if name not in nodes or name in paired:
                why = "belongs to another target" if name in paired else "is no node"
                raise RequestError(f"cluster file: {member.name} is to be near {name!r}, which {why}")
            paired.add(name)


def _check_addresses(members: Sequence[Member]) -> None:
    """Raise `RequestError` if two members share an address on one machine."""
    owners: dict[str, str] = {}
    for member in members:
        other = owners.setdefault(member.address, member.name)
        if other != member.name:
            raise RequestError(
                f"cluster file: {other} and {member.name} both listen on {member.address}; give one another port"
            )


def _read(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cluster file {path} cannot be read: {error}") from None
    try:
        import yaml
    except ImportError:
        yaml = None
    try:
        return json.loads(text) if yaml is None else yaml.safe_load(text)
    except Exception as error:  # of json or yaml
        reason = " ".join(str(error).split())
        raise RequestError(f"cluster file {path} is neither YAML nor JSON: {reason}") from None


def _node(value: object, place: str) -> Member:
    given = mapping_of(value, place, _NODE_KEYS)
    listen = text_of(given, "listen", place)
    NodeAddress.parse(listen)
    arguments = ["draft-node", "--model", text_of(given, "model", place), "--listen", listen]
    for key in ("method", "labels"):
        if key in given:
            arguments += [f"--{key}", text_of(given, key, place)]
    if "capacity" in given:
        arguments += ["--capacity", str(number_of(given, "capacity", place))]
    if "options" in given:
        arguments += ["--options", json.dumps(mapping_of(given["options"], f"{place}.options", None))]
    command = (*arguments, *names_of(given, "args", place, "texts"))
    name = text_of(given, "name", place)
    if set(name) & set(":,"):  # targets list nodes by name or address, separated by commas
        raise RequestError(f"cluster file: {place}.name must have no colon and no comma: {name!r}")
    return _placed(Member(name, NODE, command, listen), given, place)


def _target(value: object, place: str, nodes: NodeChoice) -> Member:
    given = mapping_of(value, place, _TARGET_KEYS)
    listening, address = _listening(given, place)
    drafters, chosen_nodes = nodes.by(given, place)
    arguments = ["serve", text_of(given, "model", place), *listening]
    if drafters:
        arguments += ["--drafters", drafters]
        if "labels" in given:
            arguments += ["--drafters-labels", text_of(given, "labels", place)]
    command = (*arguments, *names_of(given, "args", place, "texts"))
    member = Member(text_of(given, "name", place), TARGET, command, address)
    near = replace(member, near=names_of(given, "near", place), is_strict=given.get("strict") is True)
    return _placed(replace(near, chosen_nodes=chosen_nodes), given, place)


def _router(value: object, targets: Sequence[str]) -> Member:
    given = mapping_of(value, "router", _ROUTER_KEYS)
    listening, address = _listening(given, "router")
    command = (
        "router",
        "--targets",
        ",".join(targets),
        *listening,
        *names_of(given, "args", "router", "texts"),
    )
    return _placed(Member("router", ROUTER, command, address), given, "router")


def _listening(given: Mapping[str, Any], place: str) -> tuple[list[str], str]:
    host = text_of(given, "host", place) if "host" in given else "127.0.0.1"
    port = number_of(given, "port", place)
    named = f"[{host}]" if ":" in host else host
    return ["--host", host, "--port", str(port)], f"{named}:{port}"


def _placed(member: Member, given: Mapping[str, Any], place: str) -> Member:
    cpus, gpus = amount_of(given, "cpus", place, 1.0), amount_of(given, "gpus", place, 0.0)
    return replace(member, cpus=cpus, gpus=gpus)


def _ray(value: object) -> RaySettings:
    given = mapping_of({} if value is None else value, "ray", ("address", "namespace"))
    return RaySettings(**{key: text_of(given, key, "ray") for key in given})


def _scale(value: object, nodes: Sequence[Member]) -> ScaleRule:
    given = mapping_of(value, "autoscale", _SCALE_KEYS)
    node = text_of(given, "node", "autoscale")
    if node not in {member.name for member in nodes}:
        raise RequestError(f"cluster file: autoscale.node must name one of the nodes, not {node!r}")
    for taken in (member.name for member in nodes if replica_number(member.name, node) > 1):
        raise RequestError(f"cluster file: {taken!r} is what autoscale would call one more {node}; rename it")
    numbers: dict[str, Any] = {}
    for field in fields(ScaleRule):
        if field.name in given and field.name != "node":
            number = amount_of(given, field.name, "autoscale", 0.0)
            numbers[field.name] = int(number) if field.type == "int" or field.type is int else number
    rule = ScaleRule(node, **numbers)
    if bool(rule.node_price) != bool(rule.token_price):
        raise RequestError("cluster file: autoscale needs both of node_price and token_price, or neither")
    if (
        not 1 <= rule.least <= rule.most
        or not 0 < rule.idle <= rule.use <= 1
        or rule.levels < 1
        or rule.ahead < 1
    ):
        raise RequestError(
            "cluster file: autoscale must have 1 <= least <= most, 0 < idle <= use <= 1, levels, ahead >= 1"
        )
    return rule


def mapping_of(value: object, place: str, known: Sequence[str] | None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"cluster file: {place} must be an object")
    for key in value:
        if known is not None and key not in known:
            raise RequestError(
                f"cluster file: {place} has an unknown key {key!r}; known are {', '.join(known)}"
            )
    return value


def list_of(given: Mapping[str, Any], key: str) -> list[object]:
    found = given.get(key) or []
    if not isinstance(found, list):
        raise RequestError(f"cluster file: {key} must be a list")
    return found


def text_of(given: Mapping[str, Any], key: str, place: str) -> str:
    found = given.get(key)
    if not isinstance(found, str) or not found:
        raise _wrong(place, key, "a text", found)
    return found


def number_of(given: Mapping[str, Any], key: str, place: str) -> int:
    found = given.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < 1 << 16:
        raise _wrong(place, key, "a whole number from 1 to 65535", found)
    return found


def amount_of(given: Mapping[str, Any], key: str, place: str, default: float) -> float:
    found = given.get(key, default)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found < float("inf"):
        raise _wrong(place, key, "a number from 0 on", found)
    return float(found)


def names_of(given: Mapping[str, Any], key: str, place: str, of: str = "names") -> tuple[str, ...]:
    found = given.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise RequestError(f"cluster file: {place}.{key} must be a list of {of}")
    return tuple(found)


def _wrong(place: str, key: str, wanted: str, found: object) -> RequestError:
    return RequestError(f"cluster file: {place}.{key} must be {wanted}, not {found!r}")
