"""Prometheus metrics of the controller, draft nodes and service classes."""

from collections.abc import Mapping, Sequence
from math import nan
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from foreword.control.policy_file.document import Stage
from foreword.control.reporting.figures import ControlReport, PairReport
from foreword.engine.messages import EngineStats, RequestStats
from foreword.speculation.drafting import NodeReport

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
_PAIR = ("drafter", "cohort")

Metric = TypeVar("Metric", bound=MetricWrapperBase)


class MetricFamily(Generic[Metric]):
    """A metric of one model, by its other labels."""

    def __init__(self, metric: Metric, model_name: str) -> None:
        self._metric = metric
        self._model = model_name

    def of(self, *labels: str) -> Metric:
        """Return the metric with these labels."""
        return self._metric.labels(self._model, *labels)

    def clear(self) -> None:
        """Remove all labels, so that unset ones are not exported."""
        self._metric.clear()


class MetricMaker:
    """Creates the metrics of one model, and raises counters to the engine's totals."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._seen: dict[Counter, float] = {}  # totals of the running engine
        self._restarts = 0  # restarts before the running engine

    def counter(self, name: str, text: str, *labels: str) -> MetricFamily[Counter]:
        return MetricFamily(Counter(*_named(name, text, labels), registry=self.registry), self._model)

    def gauge(self, name: str, text: str, *labels: str) -> MetricFamily[Gauge]:
        return MetricFamily(Gauge(*_named(name, text, labels), registry=self.registry), self._model)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], *labels: str
    ) -> MetricFamily[Histogram]:
        made = Histogram(*_named(name, text, labels), buckets=buckets, registry=self.registry)
        return MetricFamily(made, self._model)

    def note_restarts(self, restarts: int) -> None:
        """Record which engine reports: a new one counts from zero."""
        if restarts != self._restarts:
            self._restarts = restarts
            self._seen.clear()

    def catch_up(self, counter: Counter, total: float) -> None:
        """Raise a counter to the engine's total."""
        before = self._seen.get(counter, 0)
        if total >= before:
            counter.inc(total - before)
            self._seen[counter] = total

    def catch_up_each(self, counters: MetricFamily[Counter], totals: Mapping[str, float]) -> None:
        """Raise the counters of one label."""
        for kind, total in totals.items():
            self.catch_up(counters.of(kind), total)


def _named(name: str, text: str, labels: Sequence[str]) -> tuple[str, str, Sequence[str]]:
    return f"foreword:{name}", text, ("model_name", *labels)


class ControlMetrics:
    """The controller's report by drafter and cohort. Vanished pairs are not exported."""

    def __init__(self, make: MetricMaker) -> None:
        self._make = make
        self._state = make.gauge("spec_decode_state", "1 for the state that the pair is in.", *_PAIR, "state")
        self._predicted = make.gauge(
            "spec_decode_predicted_gain", "Expected ratio to plain decoding.", *_PAIR
        )
        self._measured = make.gauge(
            "spec_decode_measured_gain", "Measured ratio to plain decoding.", *_PAIR, "bound"
        )
        self._depth = make.gauge("spec_decode_depth", "Draft levels that are verified now.", *_PAIR)
        self._break_even = make.gauge(
            "spec_decode_break_even_acceptance", "Acceptance at which speculation breaks even now.", *_PAIR
        )
        self._asks = make.counter("spec_decode_asks", "Draft requests to the drafter.", *_PAIR)
        self._empty = make.counter("spec_decode_empty_drafts", "Draft requests without a draft.", *_PAIR)
        self._decisions = make.counter("spec_decode_decisions", "Times that it was turned on or off.", *_PAIR)
        self._probes = make.counter(
            "spec_decode_probe_seconds", "Time of drafts that were only compared with the text."
        ).of()
        self._reference = make.counter("spec_decode_reference_passes", "Plain passes to compare with.").of()
        self._mismatches = make.gauge(
            "spec_decode_mismatches", "Requests whose text differed when decoded again."
        ).of()
        self._provisional = make.gauge(
            "spec_decode_provisional_pages", "KV pages held for draft tokens alone."
        ).of()
        self._pages = make.gauge("kv_cache_pages", "KV pages in total.").of()
        self._busy = make.counter("device_busy_seconds", "Time that devices worked.", "role")
        self._wall = make.counter("device_reserved_seconds", "Time since the engine started.").of()
        self._utilisation = make.gauge(
            "device_utilisation", "Fraction of the time that devices worked.", "role"
        )
        self._cost = make.gauge(
            "cost_per_million_tokens",
            "By the policy file's prices, for busy or reserved time.",
            "of",
        )

    def note(self, report: ControlReport) -> None:
        """Export a report."""
        for gauge in (self._state, self._predicted, self._measured, self._depth, self._break_even):
            gauge.clear()
        for pair in report.pairs:
            self._note_pair(pair)
        usage, catch_up = report.usage, self._make.catch_up
        catch_up(self._probes, report.probe_seconds)
        catch_up(self._reference, report.reference_passes)
        self._mismatches.set(report.mismatches)
        self._provisional.set(report.provisional_pages)
        self._pages.set(report.kv_pages)
        self._make.catch_up_each(self._busy, {"draft": usage.draft_seconds, "target": usage.target_seconds})
        catch_up(self._wall, usage.wall_seconds)
        self._utilisation.of("draft").set(usage.draft_utilisation)
        self._utilisation.of("target").set(usage.target_utilisation)
        for of, reserved in (("busy", False), ("reserved", True)):
            cost = usage.cost_per_million(reserved)
            if cost is not None:
                self._cost.of(of).set(cost)

    def _note_pair(self, pair: PairReport) -> None:
        own, catch_up = (pair.drafter, pair.cohort), self._make.catch_up
        for stage in Stage:
            self._state.of(*own, stage.value).set(pair.state == stage)
        if pair.predicted is not None:
            self._predicted.of(*own).set(pair.predicted.mean)
        if pair.measured is not None:
            for bound in ("low", "mean", "high"):
                self._measured.of(*own, bound).set(getattr(pair.measured, bound))
        self._depth.of(*own).set(pair.kept if pair.in_use else 0)
        if pair.break_even is not None:
            self._break_even.of(*own).set(pair.break_even)
        catch_up(self._asks.of(*own), pair.asks)
        catch_up(self._empty.of(*own), pair.asks - sum(pair.depths))
        catch_up(self._decisions.of(*own), pair.switched)


_NODE_GAUGES = {
    "homes": "Requests that are assigned to it.",
    "trips": "Times that its circuit breaker opened.",
    "waits": "Passes that waited for it.",
    "wait_seconds": "Time of these waits.",
    "acceptance": "Recent acceptance rate of its first draft level.",
}
"""Metrics by field of `NodeReport`."""


class NodeMetrics:
    """State of draft nodes by address. Totals restart with the engine, so they are gauges."""

    def __init__(self, make: MetricMaker) -> None:
        self._up = make.gauge("draft_node_up", "1 while its drafts are used and waited for.", "node")
        self._reported = {
            field: make.gauge(f"draft_node_{field}", text, "node") for field, text in _NODE_GAUGES.items()
        }
        self._first = make.gauge(
            "draft_node_first_level_seconds", "Recent time from a text to its first draft level.", "node"
        )
        self._level = make.gauge(
            "draft_node_level_seconds", "Recent time from one draft level to the next.", "node"
        )

    def note(self, nodes: Sequence[NodeReport]) -> None:
        """Export the state of all nodes."""
        for node in nodes:
            self._up.of(node.address).set(node.state == "up")
            for field, gauge in self._reported.items():
                gauge.of(node.address).set(_measured(getattr(node, field)))
            self._first.of(node.address).set(_measured(node.first_ms) / 1e3)
            self._level.of(node.address).set(_measured(node.level_ms) / 1e3)


def _measured(value: float | None) -> float:
    """Return NaN, Prometheus's unknown value, for None."""
    return nan if value is None else value


class ServiceMetrics:
    """Answers by service class of the policy file."""

    def __init__(self, make: MetricMaker) -> None:
        self._known: set[str] = set()  # classes seen
        self._running = make.gauge("service_requests_running", "Answers in progress.", "service")
        self._waiting = make.gauge("service_requests_waiting", "Answers that wait.", "service")
        self._ended = make.counter(
            "service_requests", "Answers that ended, by reason.", "service", "finished_reason"
        )
        self._tokens = make.counter("service_generation_tokens", "Tokens generated.", "service")
        self._preemptions = make.counter(
            "service_preemptions", "Times that an answer was preempted and computed again.", "service"
        )
        self._queue = make.histogram(
            "service_queue_time_seconds", "Arrival at the engine to first pass.", _LONG, "service"
        )
        self._first = make.histogram(
            "service_time_to_first_token_seconds", "Arrival at the engine to first token.", _LONG, "service"
        )
        self._tpot = make.histogram(
            "service_time_per_output_token_seconds",
            "First tokens to last, divided by the tokens after the first pass.",
            _SHORT,
            "service",
        )

    def note_engine(self, stats: EngineStats) -> None:
        """Export running and waiting answers per class."""
        self._known |= set(stats.services)
        for name in self._known:
            running, waiting = stats.services.get(name, (0, 0))
            self._running.of(name).set(running)
            self._waiting.of(name).set(waiting)

    def note_answer(self, stats: RequestStats, finish_reason: str) -> None:
        """Count a complete answer, with the engine's times."""
        own = stats.service
        self._ended.of(own, finish_reason).inc()
        self._tokens.of(own).inc(stats.output_tokens)
        self._preemptions.of(own).inc(stats.preemptions)
        self._queue.of(own).observe(stats.queue_seconds)
        if stats.output_tokens:
            self._first.of(own).observe(stats.queue_seconds + stats.prefill_seconds)
        if (later := stats.output_tokens - stats.first_tokens) > 0:
            self._tpot.of(own).observe(stats.decode_seconds / later)
