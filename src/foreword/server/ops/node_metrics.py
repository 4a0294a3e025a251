"""How draft nodes fare."""

from collections.abc import Sequence
from math import nan

from prometheus_client import CollectorRegistry, Gauge

from foreword.speculation.drafting import NodeReport

_LABELS = ("model_name", "node")


class NodeMetrics:
    """By address; as many as the server was given. Totals begin again with the engine, so that they are gauges."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"foreword:draft_node_{name}", text, _LABELS, registry=registry)

        self.up = gauge("up", "1 while its guesses are used and waited for.")
        self.homes = gauge("homes", "Requests that it drafts for.")
        self.trips = gauge("trips", "Times that it was found late or lost.")
        self.waits = gauge("waits", "Passes that waited for it.")
        self.wait_seconds = gauge("wait_seconds", "Time of these waits.")
        self.first_seconds = gauge(
            "first_level_seconds", "From a text to the first level behind it, of late."
        )
        self.level_seconds = gauge("level_seconds", "From one level to the next, of late.")
        self.acceptance = gauge("acceptance", "Part of its first levels that were right, of late.")

    def note(self, nodes: Sequence[NodeReport]) -> None:
        for node in nodes:
            labels = (self._model, node.address)
            self.up.labels(*labels).set(node.state == "up")
            self.homes.labels(*labels).set(node.homes)
            self.trips.labels(*labels).set(node.trips)
            self.waits.labels(*labels).set(node.waits)
            self.wait_seconds.labels(*labels).set(node.wait_seconds)
            self.first_seconds.labels(*labels).set(_measured(node.first_ms) / 1e3)
            self.level_seconds.labels(*labels).set(_measured(node.level_ms) / 1e3)
            self.acceptance.labels(*labels).set(_measured(node.acceptance))


def _measured(value: float | None) -> float:
    """NaN is what Prometheus has for what is not known."""
    return nan if value is None else value
