"""The file that says which targets and draft nodes there are."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from foreword.cluster.address import NodeAddress
from foreword.cluster.pools.asked import AskedNodes
from foreword.cluster.pools.fields import (
    amount_of,
    arguments_of,
    list_of,
    mapping_of,
    names_of,
    number_of,
    text_of,
)
from foreword.cluster.pools.members import NODE, ROUTER, TARGET, TARGETS_LIST, Member, replica_number
from foreword.cluster.pools.scaling import ScaleRule
from foreword.errors import RequestError

_PLACE_KEYS = ("cpus", "gpus")
_NODE_KEYS = ("name", "model", "listen", "method", "options", "labels", "capacity", "args", *_PLACE_KEYS)
_TARGET_KEYS = ("name", "model", "host", "port", "drafters", "labels", "args", "near", "strict", *_PLACE_KEYS)
_ROUTER_KEYS = ("host", "port", "args", *_PLACE_KEYS)
_SCALE_KEYS = tuple(field.name for field in fields(ScaleRule))


@dataclass(frozen=True)
class RaySettings:
    """The Ray that places and watches members."""

    address: str = ""  # of one that runs; empty: one is started here
    namespace: str = "foreword"


@dataclass(frozen=True)
class Cluster:
    """All that the file says."""

    members: list[Member]  # draft nodes first
    ray: RaySettings | None = None
    scale: ScaleRule | None = None

    def member(self, name: str) -> Member:
        return next(one for one in self.members if one.name == name)

    @property
    def room(self) -> float:
        """CPUs of all members, with all that may be added."""
        added = 0.0 if self.scale is None else (self.scale.most - 1) * self.member(self.scale.node).cpus
        return sum(one.cpus for one in self.members) + added


def read_cluster(path: Path) -> Cluster:
    """Everything is checked and refused by name before anything starts."""
    given = mapping_of(_read(path), "the file", ("nodes", "targets", "router", "ray", "autoscale"))
    nodes = [_node(one, f"nodes[{place}]") for place, one in enumerate(list_of(given, "nodes"))]
    scale = _scale(given["autoscale"], nodes) if "autoscale" in given else None
    ray = _ray(given["ray"]) if "ray" in given else None
    comes_and_goes = ray is not None or scale is not None
    listed = list_of(given, "targets")
    asked = AskedNodes(nodes, scale, is_listed=comes_and_goes)
    targets = [_target(one, f"targets[{place}]", asked) for place, one in enumerate(listed)]
    members = [*nodes, *targets]
    if "router" in given:
        behind = [TARGETS_LIST] if ray is not None else [member.address for member in targets]
        members.append(_router(given["router"], behind))
    _check(members)
    if ray is None:
        _check_addresses(members)
    return Cluster(members, ray, scale)


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
    """On one machine nobody can listen where another does."""
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
    except Exception as error:  # json's or yaml's
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
    command = (*arguments, *arguments_of(given, place))
    name = text_of(given, "name", place)
    if set(name) & set(":,"):  # targets ask for nodes by names or addresses, with commas
        raise RequestError(f"cluster file: {place}.name must have no colon and no comma: {name!r}")
    return _placed(Member(name, NODE, command, listen), given, place)


def _target(value: object, place: str, nodes: AskedNodes) -> Member:
    given = mapping_of(value, place, _TARGET_KEYS)
    listening, address = _listening(given, place)
    drafters, asks = nodes.by(given, place)
    arguments = ["serve", text_of(given, "model", place), *listening]
    if drafters:
        arguments += ["--drafters", drafters]
        if "labels" in given:
            arguments += ["--drafters-labels", text_of(given, "labels", place)]
    command = (*arguments, *arguments_of(given, place))
    member = Member(text_of(given, "name", place), TARGET, command, address)
    near = replace(member, near=names_of(given, "near", place), is_strict=given.get("strict") is True)
    return _placed(replace(near, asks=asks), given, place)


def _router(value: object, targets: Sequence[str]) -> Member:
    given = mapping_of(value, "router", _ROUTER_KEYS)
    listening, address = _listening(given, "router")
    command = ("router", "--targets", ",".join(targets), *listening, *arguments_of(given, "router"))
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
