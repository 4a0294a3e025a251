"""Reads the state of targets over HTTP, and adds or removes draft nodes."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from time import monotonic
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from foreword.cluster.pools.fleet import MemberFleet, numbers, resize
from foreword.cluster.pools.running import TARGET, Member
from foreword.cluster.pools.scaling import Demand, NodeSpeed, Scaler, ScaleRule

Fetch = Callable[[str], Any]  # returns a URL's JSON; raises `OSError` or `ValueError`


@dataclass(frozen=True)
class TargetStatus:
    """State of one target."""

    name: str
    state: str  # "ok", "starting", ...; "down": no response
    running: int = 0
    waiting: int = 0
    tokens_per_pass: float | None = None  # 1 in plain decoding; None: unknown
    cost_per_million: float | None = None  # cost of reserved time per million tokens; None: no prices are set
    reason: str = ""  # why figures are missing

    @property
    def is_ok(self) -> bool:
        return self.state == "ok"


@dataclass(frozen=True)
class NodeStatus:
    """State of one node as one target sees it."""

    target: str  # name
    node: str  # address
    # The other fields are those of `NodeReport`.
    state: str
    reason: str
    homes: int
    waits: int
    trips: int
    first_ms: float | None
    level_ms: float | None
    acceptance: float | None


_REPORTED = tuple(field.name for field in fields(NodeStatus))[2:]  # keys of a node in a target's `/health`


def fetch_json(api_key: str = "") -> Fetch:
    """Return a function that fetches a URL's JSON, with the API key if given."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def fetch(url: str) -> Any:  # noqa: ANN401 - JSON
        with urlopen(Request(url, headers=headers), timeout=5) as answer:
            return json.load(answer)

    return fetch


def cluster_status(addresses: Mapping[str, str], fetch: Fetch) -> tuple[list[TargetStatus], list[NodeStatus]]:
    """Return the states of all targets, and of their nodes; `addresses` maps names of targets to addresses."""
    targets, nodes = [], []
    for name, address in addresses.items():
        try:
            health = fetch(f"http://{address}/health")
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            why = " ".join(str(reason).split()) or type(error).__name__
            targets.append(TargetStatus(name, "down", reason=why))
            continue
        targets.append(_target(name, health))
        for node in health.get("draft_nodes", ()):
            nodes.append(NodeStatus(name, node["address"], *(node[key] for key in _REPORTED)))
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


class DemandWatch:
    """Reads the demand of all targets from `/health`; step times are means between two reads."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._before: dict[
            str, tuple[int, float]
        ] = {}  # target's URL -> (steps, device seconds) at the last read

    def read_demand(self, urls: Sequence[str]) -> tuple[list[Demand], NodeSpeed | None]:
        """Return the demands of the targets that respond, and the mean speed of their nodes (None: unknown)."""
        demands: list[Demand] = []
        nodes: list[dict[str, Any]] = []  # nodes with a measured speed, as targets report them
        for url in urls:
            try:
                health = self._fetch(f"{url}/health")
                demands += self._demand(url, health)
                nodes += [node for node in health.get("draft_nodes", ()) if node["level_ms"] is not None]
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                self._before.pop(url, None)
        if not nodes:
            return demands, None
        rates = [node["acceptance"] for node in nodes if node.get("acceptance") is not None]
        level_seconds = fmean(node["level_ms"] / 1e3 for node in nodes)
        requests = fmean(node["homes"] for node in nodes)
        return demands, NodeSpeed(level_seconds, requests, fmean(rates) if rates else None)

    def _demand(self, url: str, health: Mapping[str, Any]) -> list[Demand]:
        """Return a target's demand since the previous read as a list; empty if it is unknown."""
        engine, usage = health["engine"], health["usage"]
        steps, seconds = engine["steps"], usage["device_seconds"]
        steps_before, seconds_before = self._before.get(url, (steps, seconds))
        self._before[url] = (steps, seconds)
        if not engine["running"]:
            return [Demand(0, 0.0)]
        if steps <= steps_before or seconds <= seconds_before:
            return []  # no previous read, no step since then, or a restart
        return [Demand(engine["running"], (seconds - seconds_before) / (steps - steps_before))]


_log = logging.getLogger(__name__)

CHECK_SECONDS = 2.0  # seconds between two checks of the targets


@dataclass
class Autoscaler:
    """Checks the targets periodically, and adds or removes replicas of a node."""

    rule: ScaleRule
    node: Member
    fleet: MemberFleet
    fetch: Fetch
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        self._watch = DemandWatch(self.fetch)
        self._scaler = Scaler(self.rule, self.clock)
        self._checked_at = float("-inf")

    def rescale(self) -> None:
        """Adjust the number of nodes, unless the last check is too recent."""
        if self.clock() - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = self.clock()
        urls = [f"http://{member.address}" for member in self.fleet.members() if member.kind == TARGET]
        demands, speed = self._watch.read_demand(urls)
        running = len(numbers(self.fleet, self.node.name))
        wanted = self._scaler.size(running, demands, speed)
        if wanted != running:
            requests = sum(demand.requests for demand in demands)
            _log.info("%d draft nodes instead of %d, for %g requests", wanted, running, requests)
            resize(self.fleet, self.node, wanted)
