"""Reads the cluster file: targets, draft nodes, router, placement and scaling."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from foreword.cluster.address import NodeAddress
from foreword.cluster.pools.running import (
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

# Permitted keys of the file's sections.
_RESOURCE_KEYS = ("cpus", "gpus")
_NODE_KEYS = ("name", "model", "listen", "method", "options", "labels", "capacity", "args", *_RESOURCE_KEYS)
_TARGET_KEYS = (
    *("name", "model", "host", "port", "drafters", "labels", "args", "near", "strict"),
    *_RESOURCE_KEYS,
)
_ROUTER_KEYS = ("host", "port", "args", *_RESOURCE_KEYS)
_SCALE_KEYS = tuple(field.name for field in fields(ScaleRule))


@dataclass(frozen=True)
class RaySettings:
    """Settings of Ray."""

    address: str = ""  # address of a running Ray; empty: start one
    namespace: str = "foreword"  # Ray namespace of the members


@dataclass(frozen=True)
class ClusterConfig:
    """Contents of the cluster file."""

    members: list[Member]  # draft nodes first
    ray: RaySettings | None = None
    scale: ScaleRule | None = None

    def member(self, name: str) -> Member:
        """Return the member with this name."""
        return next(member for member in self.members if member.name == name)

    @property
    def cpus(self) -> float:
        """CPUs of all members, including the replicas that scaling may add."""
        cpus = sum(member.cpus for member in self.members)
        if self.scale is not None:
            cpus += (self.scale.most - 1) * self.member(self.scale.node).cpus
        return cpus


class NodeChoice:
    """Selects the nodes of a target: all, or those that it names."""

    def __init__(self, nodes: Sequence[Member], scale: ScaleRule | None, *, is_listed: bool) -> None:
        """`is_listed`: targets read the nodes' addresses from a file, since nodes are added and removed."""
        self._nodes = {node.name: node for node in nodes}
        self._scale = scale
        self._is_listed = is_listed

    def of_target(self, section: "Section") -> tuple[str, tuple[str, ...]]:
        """Return the value of a target's option `--drafters`, and `Member.chosen_nodes`."""
        if "drafters" not in section:
            if self._is_listed and self._nodes:
                return NODES_LIST, ()
            return ",".join(node.address for node in self._nodes.values()), ()
        value = section.values["drafters"]
        if isinstance(value, str) and value.startswith("@"):
            return value, ()
        if isinstance(value, list):
            names: Sequence[str] = section.texts("drafters", "names")
        else:
            names = entries(section.text("drafters"))
        for name in names:
            self._check(name, section)
        if self._is_listed and any(name in self._nodes for name in names):
            return NODES_LIST, tuple(replica for name in names for replica in self._replicas(name))
        addresses = [self._nodes[name].address if name in self._nodes else name for name in names]
        return ",".join(addresses), ()

    def _replicas(self, name: str) -> list[str]:
        """Return the names of all replicas that a node may have; a node that is not scaled has only itself."""
        if self._scale is None or name != self._scale.node:
            return [name]
        return [self._nodes[name].replica(number).name for number in range(1, self._scale.most + 1)]

    def _check(self, name: str, section: "Section") -> None:
        """Raise `RequestError` unless this is a node's name or an address."""
        if name in self._nodes:
            return
        try:
            NodeAddress.parse(name)
        except RequestError:
            names = ", ".join(self._nodes) or "none"
            raise section.error(
                "drafters",
                f"has {name!r}, which is neither one of the nodes ({names}) "
                "nor an address (HOST:PORT or unix:/PATH)",
            ) from None


def read_cluster(path: Path) -> ClusterConfig:
    """Read and check the cluster file."""
    section = Section(_read(path), "the file", ("nodes", "targets", "router", "ray", "autoscale"))
    nodes = [_node(value, f"nodes[{index}]") for index, value in enumerate(section.items("nodes"))]
    scale = _scale(section.values["autoscale"], nodes) if "autoscale" in section else None
    ray = _ray(section.values["ray"]) if "ray" in section else None
    choice = NodeChoice(nodes, scale, is_listed=ray is not None or scale is not None)
    values = section.items("targets")
    targets = [_target(value, f"targets[{index}]", choice) for index, value in enumerate(values)]
    members = [*nodes, *targets]
    if "router" in section:
        addresses = [TARGETS_LIST] if ray is not None else [member.address for member in targets]
        members.append(_router(section.values["router"], addresses))
    _check(members)
    if ray is None:
        _check_addresses(members)
    return ClusterConfig(members, ray, scale)


def _check(members: Sequence[Member]) -> None:
    """Raise `RequestError` if the members do not fit together."""
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
    """Return the contents of a YAML or JSON file; without PyYAML only JSON is read."""
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


class Section:
    """One object of the cluster file; its methods return the values of its keys, checked."""

    def __init__(self, value: object, location: str, keys: Sequence[str] | None) -> None:
        """Check the keys of a section; `location` is for error messages, `keys` are the permitted ones; None: all."""
        if not isinstance(value, Mapping):
            raise RequestError(f"cluster file: {location} must be an object")
        for key in value:
            if keys is not None and key not in keys:
                known = ", ".join(keys)
                raise RequestError(f"cluster file: {location} has an unknown key {key!r}; known are {known}")
        self.values: Mapping[str, Any] = value
        self._location = location

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def items(self, key: str) -> list[object]:
        value = self.values.get(key) or []
        if not isinstance(value, list):
            raise RequestError(f"cluster file: {key} must be a list")
        return value

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, f"must be a text, not {value!r}")
        return value

    def whole_number(self, key: str) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 16:
            raise self.error(key, f"must be a whole number from 1 to 65535, not {value!r}")
        return value

    def amount(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise self.error(key, f"must be a number from 0 on, not {value!r}")
        return float(value)

    def texts(self, key: str, plural: str = "texts") -> tuple[str, ...]:
        """Return a list of texts; `plural` says what they are, for the error message."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.error(key, f"must be a list of {plural}")
        return tuple(value)

    def listening(self) -> tuple[list[str], str]:
        """Return the command-line options that set a server's address, and the address."""
        host = self.text("host") if "host" in self else "127.0.0.1"
        address = NodeAddress(host, self.whole_number("port"))
        return ["--host", host, "--port", str(address.port)], str(address)

    def with_resources(self, member: Member) -> Member:
        """Return the member with the CPUs and GPUs that it reserves."""
        return replace(member, cpus=self.amount("cpus", 1.0), gpus=self.amount("gpus", 0.0))

    def error(self, key: str, problem: str) -> RequestError:
        """Return the error to raise for the value of a key."""
        return RequestError(f"cluster file: {self._location}.{key} {problem}")


def _node(value: object, location: str) -> Member:
    given = Section(value, location, _NODE_KEYS)
    name, listen = given.text("name"), given.text("listen")
    NodeAddress.parse(listen)
    arguments = ["draft-node", "--model", given.text("model"), "--listen", listen]
    for key in ("method", "labels"):
        if key in given:
            arguments += [f"--{key}", given.text(key)]
    if "capacity" in given:
        arguments += ["--capacity", str(given.whole_number("capacity"))]
    if "options" in given:
        options = Section(given.values["options"], f"{location}.options", None)
        arguments += ["--options", json.dumps(options.values)]
    if set(name) & set(":,"):  # targets list nodes by name or address, separated by commas
        raise given.error("name", f"must have no colon and no comma: {name!r}")
    return given.with_resources(Member(name, NODE, (*arguments, *given.texts("args")), listen))


def _target(value: object, location: str, nodes: NodeChoice) -> Member:
    given = Section(value, location, _TARGET_KEYS)
    options, address = given.listening()
    drafters, chosen_nodes = nodes.of_target(given)
    arguments = ["serve", given.text("model"), *options]
    if drafters:
        arguments += ["--drafters", drafters]
        if "labels" in given:
            arguments += ["--drafters-labels", given.text("labels")]
    member = Member(given.text("name"), TARGET, (*arguments, *given.texts("args")), address)
    near, is_strict = given.texts("near", "names"), given.values.get("strict") is True
    return given.with_resources(replace(member, near=near, is_strict=is_strict, chosen_nodes=chosen_nodes))


def _router(value: object, targets: Sequence[str]) -> Member:
    given = Section(value, "router", _ROUTER_KEYS)
    options, address = given.listening()
    command = ("router", "--targets", ",".join(targets), *options, *given.texts("args"))
    return given.with_resources(Member("router", ROUTER, command, address))


def _ray(value: object) -> RaySettings:
    given = Section({} if value is None else value, "ray", ("address", "namespace"))
    return RaySettings(**{key: given.text(key) for key in given.values})


def _scale(value: object, nodes: Sequence[Member]) -> ScaleRule:
    given = Section(value, "autoscale", _SCALE_KEYS)
    node = given.text("node")
    if node not in {member.name for member in nodes}:
        raise given.error("node", f"must name one of the nodes, not {node!r}")
    for member in nodes:
        if replica_number(member.name, node) > 1:
            raise RequestError(
                f"cluster file: autoscale would give a replica of {node} the name of the node {member.name!r}; "
                "rename it"
            )
    numbers: dict[str, Any] = {}
    for field in fields(ScaleRule):
        if field.name in given and field.name != "node":
            number = given.amount(field.name, 0.0)
            numbers[field.name] = int(number) if field.type in ("int", int) else number
    rule = ScaleRule(node, **numbers)
    if bool(rule.node_price) != bool(rule.token_price):
        raise RequestError("cluster file: autoscale needs both of node_price and token_price, or neither")
    is_ordered = 1 <= rule.least <= rule.most and 0 < rule.idle <= rule.use <= 1
    if not is_ordered or rule.levels < 1 or rule.ahead < 1:
        raise RequestError(
            "cluster file: autoscale must have 1 <= least <= most, 0 < idle <= use <= 1, levels, ahead >= 1"
        )
    return rule
