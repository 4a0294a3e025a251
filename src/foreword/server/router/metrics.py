"""What a router counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from foreword.server.router.targets import Targets


class RouterMetrics:
    """By target: as many as the router was given."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"foreword:router_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"foreword:router_target_{name}", text, ["target"], registry=registry)

        self.answers = counter(
            "answers", "Answers passed on, by status, or broken or aborted.", "target", "code"
        )
        self.retries = counter(
            "retries", "Requests that another target got, by why the first did not.", "reason"
        )
        self.refusals = counter("refusals", "Requests that no target got.", "code")
        self.broken = counter("broken", "Answers that broke off after their first byte.", "target")
        self.prefix_hits = counter(
            "prefix_hits", "Requests that went to the target that knew their beginning."
        )
        self._ready = gauge("ready", "1 while it takes requests.")
        self._load = gauge("load", "Requests that it has.")
        self._in_flight = gauge("in_flight", "Requests of this router that it has.")

    def note_refusal(self, status: int) -> None:
        self.refusals.labels(str(status)).inc()

    def page(self, targets: Targets) -> bytes:
        for gauge in (self._ready, self._load, self._in_flight):
            gauge.clear()  # of those that are gone nothing is told
        for target in targets:
            self._ready.labels(target.url).set(target.is_ready)
            self._load.labels(target.url).set(target.load)
            self._in_flight.labels(target.url).set(target.in_flight)
        return generate_latest(self._registry)
