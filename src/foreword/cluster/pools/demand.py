"""What targets ask of draft nodes and how fast these are, by what the targets say."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from foreword.cluster.pools.scaling import Demand, NodeSpeed
from foreword.cluster.pools.status import Fetch


class DemandWatch:
    """Looks at `/health` of all targets; what a step takes is what came since the look before."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._before: dict[str, tuple[int, float]] = {}  # by target: steps, and seconds of its devices

    def look(self, urls: Sequence[str]) -> tuple[list[Demand], NodeSpeed | None]:
        """Targets that do not answer ask for nothing."""
        demands, levels, homes, rates = [], [], [], []
        for url in urls:
            try:
                health = self._fetch(f"{url}/health")
                demands += self._demand(url, health)
                nodes = [node for node in health.get("draft_nodes", ()) if node["level_ms"] is not None]
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                self._before.pop(url, None)
                continue
            levels += [node["level_ms"] / 1e3 for node in nodes]
            homes += [node["homes"] for node in nodes]
            rates += [rate for node in nodes if (rate := node.get("acceptance")) is not None]
        acceptance = fmean(rates) if rates else None
        return demands, NodeSpeed(fmean(levels), fmean(homes), acceptance) if levels else None

    def _demand(self, url: str, health: Mapping[str, Any]) -> list[Demand]:
        engine, usage = health["engine"], health["usage"]
        steps, seconds = engine["steps"], usage["device_seconds"]
        before = self._before.get(url)
        self._before[url] = (steps, seconds)
        if not engine["running"]:
            return [Demand(0, 0.0)]
        if before is None or steps <= before[0] or seconds <= before[1]:
            return []  # a restart, or nothing to go by yet
        return [Demand(engine["running"], (seconds - before[1]) / (steps - before[0]))]
