"""How a cluster stands, as its targets tell."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

Fetch = Callable[[str], Any]
"""What a URL answers, as JSON; raises `OSError` or `ValueError`."""


@dataclass(frozen=True)
class TargetStatus:
    """One target."""

    name: str
    state: str  # "ok", "starting", ...; "down": it does not answer
    running: int = 0
    waiting: int = 0
    tokens_per_pass: float | None = None  # what guessing brings; 1 is plain decoding
    cost_per_million: float | None = None  # tokens, of the time that is paid for; None without prices
    reason: str = ""

    @property
    def is_ok(self) -> bool:
        return self.state == "ok"


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
    acceptance: float | None


def fetch_json(api_key: str = "") -> Fetch:
    """Asks over HTTP, with a key if there is one."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def fetch(url: str) -> Any:  # noqa: ANN401 - JSON
        with urlopen(Request(url, headers=headers), timeout=5) as answer:
            return json.load(answer)

    return fetch


def cluster_status(addresses: Mapping[str, str], fetch: Fetch) -> tuple[list[TargetStatus], list[NodeStatus]]:
    """All targets, by name where they are, and all nodes that they know."""
    targets, nodes = [], []
    for name, address in addresses.items():
        try:
            health = fetch(f"http://{address}/health")
        except (OSError, URLError, ValueError) as error:
            targets.append(TargetStatus(name, "down", reason=_why(error)))
            continue
        targets.append(_target(name, health))
        nodes += [_node(name, node) for node in health.get("draft_nodes", ())]
    return targets, nodes


def _target(name: str, health: dict[str, Any]) -> TargetStatus:
    engine, speculation = health.get("engine", {}), health.get("speculation", {})
    return TargetStatus(
        name,
        health["status"],
        engine.get("running", 0),
        engine.get("waiting", 0),
        speculation.get("tau") or None,
        health.get("usage", {}).get("cost_per_million_reserved"),
        "" if "model" in health else "figures need its API key",
    )


def _why(error: Exception) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    return " ".join(str(reason).split()) or type(error).__name__


def _node(target: str, told: dict[str, Any]) -> NodeStatus:
    own = ("state", "reason", "homes", "waits", "trips", "first_ms", "level_ms", "acceptance")
    return NodeStatus(target, told["address"], *(told[key] for key in own))
