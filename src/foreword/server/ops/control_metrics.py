"""The controller's report as metrics."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from foreword.control.policy_file.document import Stage
from foreword.control.reporting.figures import ControlReport, PairReport

_PAIR = ("model_name", "drafter", "cohort")


class ControlMetrics:
    """By drafter and cohort, and of the devices. Pairs that are told no more vanish."""

    def __init__(
        self, registry: CollectorRegistry, model_name: str, catch_up: Callable[[Counter, float], None]
    ) -> None:
        """`catch_up` brings a counter to the engine's own total."""
        self._registry = registry
        self._model = model_name
        self._catch_up = catch_up
        self._state = self._gauge(
            "spec_decode_state", "1 for the state that the pair is in.", (*_PAIR, "state")
        )
        self._predicted = self._gauge(
            "spec_decode_predicted_gain", "Ratio to plain decoding, expected.", _PAIR
        )
        self._measured = self._gauge(
            "spec_decode_measured_gain", "Ratio to plain decoding, measured.", (*_PAIR, "bound")
        )
        self._depth = self._gauge("spec_decode_depth", "Levels that are worth verifying now.", _PAIR)
        self._break_even = self._gauge(
            "spec_decode_break_even_acceptance", "Acceptance with which it would pay now.", _PAIR
        )
        self._asks = self._counter("spec_decode_asks", "Times that the drafter was asked.", _PAIR)
        self._empty = self._counter("spec_decode_empty_drafts", "Asks without a draft to verify.", _PAIR)
        self._decisions = self._counter("spec_decode_decisions", "Times that it was turned on or off.", _PAIR)
        self._of_devices()

    def _of_devices(self) -> None:
        own = ("model_name",)
        self._probes = self._counter("spec_decode_probe_seconds", "Drafts only compared with the text.", own)
        self._reference = self._counter("spec_decode_reference_passes", "Plain passes to compare with.", own)
        self._mismatches = self._gauge(
            "spec_decode_mismatches", "Requests that came out differently when decoded again.", own
        )
        self._provisional = self._gauge(
            "spec_decode_provisional_pages", "KV pages held for guesses alone.", own
        )
        self._pages = self._gauge("kv_cache_pages", "KV pages that there are.", own)
        role, price = ("model_name", "role"), ("model_name", "of")
        self._busy = self._counter("device_busy_seconds", "Time that devices worked.", role)
        self._wall = self._counter("device_reserved_seconds", "Time since the engine began.", own)
        self._utilisation = self._gauge("device_utilisation", "Part of the time that devices worked.", role)
        self._cost = self._gauge(
            "cost_per_million_tokens", "Of busy or of all time, by the prices given.", price
        )

    def _gauge(self, name: str, text: str, labels: Sequence[str]) -> Gauge:
        return Gauge(f"foreword:{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"foreword:{name}", text, labels, registry=self._registry)

    def note(self, report: ControlReport) -> None:
        """Take a report."""
        for gauge in (self._state, self._predicted, self._measured, self._depth, self._break_even):
            gauge.clear()
        for pair in report.pairs:
            self._note_pair(pair)
        own, usage = (self._model,), report.usage
        self._catch_up(self._probes.labels(*own), report.probe_seconds)
        self._catch_up(self._reference.labels(*own), report.reference_passes)
        self._mismatches.labels(*own).set(report.mismatches)
        self._provisional.labels(*own).set(report.provisional_pages)
        self._pages.labels(*own).set(report.kv_pages)
        self._catch_up(self._busy.labels(*own, "draft"), usage.draft_seconds)
        self._catch_up(self._busy.labels(*own, "target"), usage.target_seconds)
        self._catch_up(self._wall.labels(*own), usage.wall_seconds)
        self._utilisation.labels(*own, "draft").set(usage.draft_utilisation)
        self._utilisation.labels(*own, "target").set(usage.target_utilisation)
        for of, reserved in (("busy", False), ("reserved", True)):
            cost = usage.cost_per_million(reserved)
            if cost is not None:
                self._cost.labels(*own, of).set(cost)

    def _note_pair(self, pair: PairReport) -> None:
        own = (self._model, pair.drafter, pair.cohort)
        for stage in Stage:
            self._state.labels(*own, stage.value).set(pair.state == stage)
        if pair.predicted is not None:
            self._predicted.labels(*own).set(pair.predicted.mean)
        if pair.measured is not None:
            for bound in ("low", "mean", "high"):
                self._measured.labels(*own, bound).set(getattr(pair.measured, bound))
        self._depth.labels(*own).set(pair.kept if pair.in_use else 0)
        if pair.break_even is not None:
            self._break_even.labels(*own).set(pair.break_even)
        self._catch_up(self._asks.labels(*own), pair.asks)
        self._catch_up(self._empty.labels(*own), pair.asks - sum(pair.depths))
        self._catch_up(self._decisions.labels(*own), pair.switched)
