"""How a cluster stands, as its targets tell."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from foreword.cluster.pools.file import Member

Fetch = Callable[[str], Any]
"""What a URL answers, as JSON; raises `OSError` or `ValueError`."""


@dataclass(frozen=True)
class TargetStatus:
    """One target; without a state it does not answer."""

    name: str
    state: str
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class NodeStatus:
    """One node as one target knows it."""

    target: str
    node: str
    state: str
    reason: str
    homes: int
    waits: int
    trips: int
    first_ms: float | None
    level_ms: float | None
    acceptance: float


def fetch_json(api_key: str = "") -> Fetch:
    """Asks over HTTP, with a key if there is one."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def fetch(url: str) -> Any:  # noqa: ANN401 - JSON
        with urlopen(Request(url, headers=headers), timeout=5) as answer:
            return json.load(answer)

    return fetch


def cluster_status(members: Sequence[Member], fetch: Fetch) -> tuple[list[TargetStatus], list[NodeStatus]]:
    """All targets, and all nodes that they know."""
    targets, nodes = [], []
    for member in members:
        if not member.is_target:
            continue
        try:
            health = fetch(f"{member.url}/health")
        except (OSError, URLError, ValueError) as error:
            targets.append(TargetStatus(member.name, f"no answer: {error}"))
            continue
        engine = health.get("engine", {})
        status = TargetStatus(
            member.name, health["status"], engine.get("running", 0), engine.get("waiting", 0)
        )
        targets.append(status)
        nodes += [_node(member.name, node) for node in health.get("draft_nodes", ())]
    return targets, nodes


def _node(target: str, told: dict[str, Any]) -> NodeStatus:
    own = ("state", "reason", "homes", "waits", "trips", "first_ms", "level_ms", "acceptance")
    return NodeStatus(target, told["address"], *(told[key] for key in own))
