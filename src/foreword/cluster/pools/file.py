"""The file that says which targets and draft nodes there are."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.cluster.address import NodeAddress
from foreword.errors import RequestError

_NODE_KEYS = ("name", "model", "listen", "method", "options", "labels", "capacity", "args")
_TARGET_KEYS = ("name", "model", "host", "port", "drafters", "labels", "args")


@dataclass(frozen=True)
class Member:
    """One process of the cluster."""

    name: str
    arguments: tuple[str, ...]  # of `foreword`
    url: str = ""  # of a target; empty: it is a draft node

    @property
    def is_target(self) -> bool:
        return bool(self.url)


def read_cluster(path: Path) -> list[Member]:
    """The members, draft nodes first; everything is checked and refused by name before anything starts."""
    given = _mapping(_read(path), "the file", ("nodes", "targets"))
    nodes = [_node(one, f"nodes[{place}]") for place, one in enumerate(_list(given, "nodes"))]
    addresses = [member.arguments[member.arguments.index("--listen") + 1] for member in nodes]
    targets = [
        _target(one, f"targets[{place}]", addresses) for place, one in enumerate(_list(given, "targets"))
    ]
    members = [*nodes, *targets]
    names = [member.name for member in members]
    if len(set(names)) != len(names):
        raise RequestError(f"cluster file: two members have the same name; there are {', '.join(names)}")
    if not members:
        raise RequestError("cluster file: it has neither nodes nor targets")
    return members


def _read(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
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
    given = _mapping(value, place, _NODE_KEYS)
    listen = _text(given, "listen", place)
    NodeAddress.parse(listen)
    arguments = ["draft-node", "--model", _text(given, "model", place), "--listen", listen]
    for key in ("method", "labels"):
        if key in given:
            arguments += [f"--{key}", _text(given, key, place)]
    if "capacity" in given:
        arguments += ["--capacity", str(_number(given, "capacity", place))]
    if "options" in given:
        arguments += ["--options", json.dumps(_mapping(given["options"], f"{place}.options", None))]
    return Member(_text(given, "name", place), (*arguments, *_arguments(given, place)))


def _target(value: object, place: str, nodes: Sequence[str]) -> Member:
    given = _mapping(value, place, _TARGET_KEYS)
    host = _text(given, "host", place) if "host" in given else "127.0.0.1"
    port = _number(given, "port", place)
    drafters = _text(given, "drafters", place) if "drafters" in given else ",".join(nodes)
    arguments = ["serve", _text(given, "model", place), "--host", host, "--port", str(port)]
    if drafters:
        arguments += ["--drafters", drafters]
        if "labels" in given:
            arguments += ["--drafters-labels", _text(given, "labels", place)]
    named = f"[{host}]" if ":" in host else host
    return Member(
        _text(given, "name", place), (*arguments, *_arguments(given, place)), f"http://{named}:{port}"
    )


def _mapping(value: object, place: str, known: Sequence[str] | None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"cluster file: {place} must be an object")
    for key in value:
        if known is not None and key not in known:
            raise RequestError(
                f"cluster file: {place} has an unknown key {key!r}; known are {', '.join(known)}"
            )
    return value


def _list(given: Mapping[str, Any], key: str) -> list[object]:
    found = given.get(key) or []
    if not isinstance(found, list):
        raise RequestError(f"cluster file: {key} must be a list")
    return found


def _text(given: Mapping[str, Any], key: str, place: str) -> str:
    found = given.get(key)
    if not isinstance(found, str) or not found:
        raise RequestError(f"cluster file: {place}.{key} must be a text, not {found!r}")
    return found


def _number(given: Mapping[str, Any], key: str, place: str) -> int:
    found = given.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < 1 << 16:
        raise RequestError(f"cluster file: {place}.{key} must be a whole number from 1 on, not {found!r}")
    return found


def _arguments(given: Mapping[str, Any], place: str) -> list[str]:
    found = given.get("args", [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise RequestError(f"cluster file: {place}.args must be a list of texts")
    return found
