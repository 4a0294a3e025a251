"""Prometheus metrics: vLLM's names, with our prefix, and additional ones."""

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foreword.control.policy_file.document import Stage
from foreword.control.reporting.figures import ControlReport, PairReport
from foreword.engine.messages import EngineStats, RequestStats
from foreword.engine.outputs import accepted_runs, sum_stats
from foreword.server import learning_metrics
from foreword.speculation.drafting import NodeReport

# Upper bounds of histogram buckets.
_SHORT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LONG_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_SERVICE_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
_TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20, 50, 100)
_ACCEPTED_TOKENS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
_PASSES_PER_TOKEN = (0.1, 0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 1.0, 1.5, 2.0, 5.0)

# Label names.
_PAIR = ("drafter", "cohort")
_METHOD = ("method", "cohort")
_POSITION = (*_METHOD, "position")

# In the following tables an entry is (name, help, *labels besides `model_name`).
_ENGINE_GAUGES = {
    "running": ("num_requests_running", "Answers that the engine works on."),
    "waiting": ("num_requests_waiting", "Answers that wait for the engine."),
    "kv_usage": ("kv_cache_usage_perc", "Fraction of the KV pages in use."),
    "kv_pages_used": ("kv_cache_pages_used", "KV pages that requests hold."),
    "speculating": ("spec_decode_enabled", "0 while speculation is switched off for all requests."),
    "drafter_memory_bytes": ("spec_decode_drafter_memory_bytes", "Memory of drafters beyond the target's."),
    "kernels_loaded": ("gpu_kernels_loaded", "Kernels that are compiled and loaded on the GPU."),
    "kernels_pending": ("gpu_kernels_pending", "Kernels that are being compiled."),
    "states_used": ("recurrent_states_used", "States of recurrent layers in use."),
    "state_checkpoints": ("recurrent_state_checkpoints", "States that the prefix cache keeps."),
}
_ENGINE_TOTALS = {
    "preemptions": ("num_preemptions", "Times that an answer was preempted and computed again."),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "steps": ("engine_steps", "Steps of the engine."),
    "passes_captured": ("gpu_passes_captured", "Passes that were captured as CUDA graphs."),
    "passes_eager": ("gpu_passes_eager", "Passes without a CUDA graph that could have one."),
    "state_hits": ("recurrent_state_hits", "Answers that began with a state of the prefix cache."),
    "state_evictions": ("recurrent_state_evictions", "States dropped from the prefix cache to keep others."),
    "passes_cold": ("gpu_passes_cold", "Passes that were the first of their shape, or captured."),
}
"""Metrics by field of `EngineStats`."""

_COST_COUNTERS = {
    "drafts": ("spec_decode_num_drafts", "Passes that verified draft tokens."),
    "drafted": ("spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    "accepted": ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
    "draft_seconds": ("spec_decode_draft_seconds", "Time of drafting."),
    "verify_seconds": ("spec_decode_verify_seconds", "Time of target passes."),
    "accept_seconds": ("spec_decode_accept_seconds", "Time of accepting and committing."),
    "rollback_tokens": ("spec_decode_rollback_tokens", "Draft tokens computed and rejected."),
    "rejected_kv_bytes": ("spec_decode_rejected_kv_bytes", "KV bytes of rejected draft tokens."),
    "passes": ("spec_decode_target_passes", "Target passes, by answers that took part."),
    "output_tokens": ("spec_decode_output_tokens", "Tokens of answers, for tokens per pass."),
}
_POSITION_COUNTERS = {
    "drafted_per_position": ("spec_decode_num_drafts_per_pos", "Drafts that had a token at this position."),
    "accepted_per_position": (
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by position.",
    ),
    "rejected_per_position": ("spec_decode_num_first_rejections_per_pos", "Drafts first rejected here."),
}
_LATENCIES = {
    "queue_seconds": ("request_queue_time_seconds", "Arrival at the engine to first pass."),
    "prefill_seconds": ("request_prefill_time_seconds", "First pass to first token."),
    "decode_seconds": ("request_decode_time_seconds", "First token to last."),
}
"""Metrics by field of `RequestStats`: `_COST_COUNTERS` by method, `_POSITION_COUNTERS` also by position."""

_NODE_GAUGES = {
    "homes": ("draft_node_homes", "Requests that are assigned to the node."),
    "trips": ("draft_node_trips", "Times that the node's circuit breaker opened."),
    "waits": ("draft_node_waits", "Passes that waited for the node."),
    "wait_seconds": ("draft_node_wait_seconds", "Time that passes waited for the node."),
    "acceptance": ("draft_node_acceptance", "Recent acceptance rate of the first draft level."),
}
"""Metrics by field of `NodeReport`. The totals are gauges, because they restart with the engine."""

_PAIR_GAUGES = (
    ("spec_decode_state", "1 for the state that the pair is in.", *_PAIR, "state"),
    ("spec_decode_predicted_gain", "Expected ratio to plain decoding.", *_PAIR),
    ("spec_decode_measured_gain", "Measured ratio to plain decoding.", *_PAIR, "bound"),
    ("spec_decode_depth", "Draft levels that are verified now.", *_PAIR),
    ("spec_decode_break_even_acceptance", "Acceptance at which speculation breaks even now.", *_PAIR),
)
_GAUGES: Sequence[tuple[str, ...]] = (
    ("num_requests_in_flight", "Answers accepted and not ended."),
    ("engine_ready", "1 if the engine takes requests."),
    ("engine_restarts", "Times that the engine died and was restarted."),
    ("service_requests_running", "Answers in progress.", "service"),
    ("service_requests_waiting", "Answers that wait.", "service"),
    ("draft_node_up", "1 while passes use the node's drafts and wait for them.", "node"),
    ("draft_node_first_level_seconds", "Recent time from a text to its first draft level.", "node"),
    ("draft_node_level_seconds", "Recent time from one draft level to the next.", "node"),
    ("spec_decode_mismatches", "Requests whose text differed when decoded again."),
    ("spec_decode_provisional_pages", "KV pages held for draft tokens alone."),
    ("kv_cache_pages", "KV pages in total."),
    ("device_utilisation", "Fraction of the time that devices worked.", "role"),
    ("cost_per_million_tokens", "Cost at the policy file's prices, for busy or for reserved time.", "of"),
    *_PAIR_GAUGES,
    *_ENGINE_GAUGES.values(),
    *((*entry, "node") for entry in _NODE_GAUGES.values()),
    *learning_metrics.GAUGES,
)
_COUNTERS: Sequence[tuple[str, ...]] = (
    ("engine_step_seconds", "Time of the engine's steps, by stage.", "stage"),
    ("engine_step_faults", "Failures that the engine recovered from, by stage.", "stage"),
    ("spec_decode_drafter_faults", "Drafts lost because the drafter failed.", "method"),
    ("request_success", "Answers that ended, by reason.", "finished_reason"),
    ("request_refused", "Requests refused, by status.", "status"),
    ("prompt_tokens", "Prompt tokens processed."),
    ("generation_tokens", "Tokens generated."),
    ("service_requests", "Answers that ended, by reason.", "service", "finished_reason"),
    ("service_generation_tokens", "Tokens generated.", "service"),
    ("service_preemptions", "Times that an answer was preempted and computed again.", "service"),
    ("spec_decode_asks", "Draft requests to the drafter.", *_PAIR),
    ("spec_decode_empty_drafts", "Draft requests without a draft.", *_PAIR),
    ("spec_decode_decisions", "Times that the drafter was turned on or off.", *_PAIR),
    ("spec_decode_probe_seconds", "Time of drafts that were only compared with the text."),
    ("spec_decode_reference_passes", "Plain passes that were run to measure the gain."),
    ("device_busy_seconds", "Time that devices worked.", "role"),
    ("device_reserved_seconds", "Time since the engine started."),
    *_ENGINE_TOTALS.values(),
    *learning_metrics.COUNTERS,
    *((*entry, *_METHOD) for entry in _COST_COUNTERS.values()),
    *((*entry, *_POSITION) for entry in _POSITION_COUNTERS.values()),
)
_TOKEN_TIME_HELP = "First tokens to last, divided by the tokens after the first pass."
_DELIVERY_HELP = "Time since the previous delivery, divided by the new tokens."
# Here an entry begins with the buckets.
_HISTOGRAMS: Sequence[tuple[Any, ...]] = (
    (_COUNTS, "request_params_n", "n of a request."),
    (_TOKEN_COUNTS, "request_prompt_tokens", "Prompt tokens of a request."),
    (_TOKEN_COUNTS, "request_generation_tokens", "Tokens of an answer."),
    (_TOKEN_COUNTS, "request_params_max_tokens", "max_tokens of a request."),
    (_LONG_SECONDS, "time_to_first_token_seconds", "Admission of a request to an answer's first token."),
    (_LONG_SECONDS, "e2e_request_latency_seconds", "Admission of a request to an answer's end."),
    (_LONG_SECONDS, "request_inference_time_seconds", "First pass to last token."),
    *((_LONG_SECONDS, *entry) for entry in _LATENCIES.values()),
    (_SHORT_SECONDS, "inter_token_latency_seconds", _DELIVERY_HELP),
    (_SHORT_SECONDS, "request_time_per_output_token_seconds", _TOKEN_TIME_HELP),
    (_SHORT_SECONDS, "service_time_per_output_token_seconds", _TOKEN_TIME_HELP, "service"),
    (_SERVICE_SECONDS, "service_queue_time_seconds", "Arrival at the engine to first pass.", "service"),
    (
        _SERVICE_SECONDS,
        "service_time_to_first_token_seconds",
        "Arrival at the engine to first token.",
        "service",
    ),
    (
        _ACCEPTED_TOKENS,
        "spec_decode_accepted_run_length",
        "Draft tokens accepted per pass with a draft.",
        *_METHOD,
    ),
    (_PASSES_PER_TOKEN, "spec_decode_target_passes_per_output_token", "Target passes per token.", *_METHOD),
)


class Metrics:
    """All metrics of one server."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.totals: dict[str, RequestStats] = {}  # cohort -> sums over its ended answers
        self._model = model_name
        self._metrics: dict[str, Any] = {}  # by name, without the prefix
        # (metric, *labels) -> the part of the running engine's total that the counter includes
        self._engine_totals: dict[tuple[str, ...], float] = {}
        self._restarts = 0  # restarts before the running engine
        self._services: set[str] = set()  # service classes that requests have had
        for entry in _GAUGES:
            self._declare(Gauge, *entry)
        for entry in _COUNTERS:
            self._declare(Counter, *entry)
        for buckets, *histogram in _HISTOGRAMS:
            self._declare(Histogram, *histogram, buckets=buckets)

    def _declare(self, make: Any, name: str, text: str, *labels: str, **options: Any) -> None:  # noqa: ANN401
        """Create a metric of the class `make`."""
        metric = make(f"foreword:{name}", text, ("model_name", *labels), registry=self.registry, **options)
        self._metrics[name] = metric if labels else metric.labels(self._model)

    def _labelled(self, name: str, labels: tuple[str, ...]) -> Any:  # noqa: ANN401 - any metric type
        return self._metrics[name].labels(self._model, *labels) if labels else self._metrics[name]

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Set a gauge; None is exported as NaN, Prometheus's unknown value."""
        self._labelled(name, labels).set(nan if value is None else value)

    def inc(self, name: str, amount: float, *labels: str) -> None:
        self._labelled(name, labels).inc(amount)

    def observe(self, name: str, value: float, *labels: str) -> None:
        self._labelled(name, labels).observe(value)

    def _catch_up(self, name: str, total: float, *labels: str) -> None:
        """Raise a counter to the engine's total; a lower total is that of older statistics, and changes nothing."""
        counted = self._engine_totals.get((name, *labels), 0)
        if total >= counted:
            self.inc(name, total - counted, *labels)
            self._engine_totals[name, *labels] = total

    def _catch_up_each(self, name: str, totals: Mapping[str, float]) -> None:
        """Raise the counters of a metric with one label to the totals by label."""
        for label, total in totals.items():
            self._catch_up(name, total, label)

    def note_refusal(self, status: int) -> None:
        self.inc("request_refused", 1, str(status))

    def note_engine(self, stats: EngineStats, restarts: int) -> None:
        """Export the engine's statistics; `restarts` identifies the engine, since a new one counts from zero."""
        if restarts != self._restarts:
            self._restarts = restarts
            self._engine_totals.clear()
        for field, (name, _) in _ENGINE_GAUGES.items():
            self.set(name, getattr(stats, field) or 0)
        for field, (name, _) in _ENGINE_TOTALS.items():
            self._catch_up(name, getattr(stats, field))
        self._catch_up_each("engine_step_seconds", _seconds_by_stage(stats))
        self._catch_up_each("spec_decode_drafter_faults", stats.drafter_faults)
        self._catch_up_each("engine_step_faults", stats.step_faults)
        self._services |= set(stats.services)
        for service in self._services:
            running, waiting = stats.services.get(service, (0, 0))
            self.set("service_requests_running", running, service)
            self.set("service_requests_waiting", waiting, service)
        for node in stats.draft_nodes:
            self._note_node(node)
        if stats.control is not None:
            self._note_control(stats.control)
        if stats.learning is not None:
            for name, value, *labels in learning_metrics.gauges(stats.learning):
                self.set(name, value, *labels)
            for name, total in learning_metrics.totals(stats.learning).items():
                self._catch_up(name, total)

    def _note_node(self, node: NodeReport) -> None:
        self.set("draft_node_up", node.state == "up", node.address)
        for field, (name, *_) in _NODE_GAUGES.items():
            self.set(name, getattr(node, field), node.address)
        for name, milliseconds in (("first_level", node.first_ms), ("level", node.level_ms)):
            seconds = None if milliseconds is None else milliseconds / 1e3
            self.set(f"draft_node_{name}_seconds", seconds, node.address)

    def _note_control(self, report: ControlReport) -> None:
        """Export the policy's report; gauges of pairs that are not in the report are removed."""
        for name, *_ in _PAIR_GAUGES:
            self._metrics[name].clear()
        for pair in report.pairs:
            self._note_pair(pair)
        usage = report.usage
        self._catch_up("spec_decode_probe_seconds", report.probe_seconds)
        self._catch_up("spec_decode_reference_passes", report.reference_passes)
        self.set("spec_decode_mismatches", report.mismatches)
        self.set("spec_decode_provisional_pages", report.provisional_pages)
        self.set("kv_cache_pages", report.kv_pages)
        self._catch_up("device_reserved_seconds", usage.wall_seconds)
        for role in ("draft", "target"):
            self._catch_up("device_busy_seconds", getattr(usage, f"{role}_seconds"), role)
            self.set("device_utilisation", getattr(usage, f"{role}_utilisation"), role)
        for time, is_reserved in (("busy", False), ("reserved", True)):
            if (cost := usage.cost_per_million(is_reserved)) is not None:
                self.set("cost_per_million_tokens", cost, time)

    def _note_pair(self, pair: PairReport) -> None:
        labels = (pair.drafter, pair.cohort)
        for stage in Stage:
            self.set("spec_decode_state", pair.state == stage, *labels, stage.value)
        if pair.predicted is not None:
            self.set("spec_decode_predicted_gain", pair.predicted.mean, *labels)
        if pair.measured is not None:
            for bound in ("low", "mean", "high"):
                self.set("spec_decode_measured_gain", getattr(pair.measured, bound), *labels, bound)
        self.set("spec_decode_depth", pair.kept if pair.in_use else 0, *labels)
        if pair.break_even is not None:
            self.set("spec_decode_break_even_acceptance", pair.break_even, *labels)
        self._catch_up("spec_decode_asks", pair.asks, *labels)
        self._catch_up("spec_decode_empty_drafts", pair.asks - sum(pair.depths), *labels)
        self._catch_up("spec_decode_decisions", pair.switched, *labels)

    def note_answer(self, stats: RequestStats, finish_reason: str) -> None:
        """Count a complete answer, with the engine's times."""
        service = stats.service
        self.inc("service_requests", 1, service, finish_reason)
        self.inc("service_generation_tokens", stats.output_tokens, service)
        self.inc("service_preemptions", stats.preemptions, service)
        self.observe("service_queue_time_seconds", stats.queue_seconds, service)
        self.observe("request_generation_tokens", stats.output_tokens)
        for field, (name, _) in _LATENCIES.items():
            self.observe(name, getattr(stats, field))
        self.observe("request_inference_time_seconds", stats.prefill_seconds + stats.decode_seconds)
        if (later := stats.output_tokens - stats.first_tokens) > 0:
            self.observe("request_time_per_output_token_seconds", stats.decode_seconds / later)
            self.observe("service_time_per_output_token_seconds", stats.decode_seconds / later, service)
        if stats.output_tokens:
            first_token = stats.queue_seconds + stats.prefill_seconds
            self.observe("service_time_to_first_token_seconds", first_token, service)
            passes = stats.passes / stats.output_tokens
            self.observe("spec_decode_target_passes_per_output_token", passes, *_method_labels(stats))

    def note_costs(self, index: int, stats: RequestStats) -> None:
        """Count the costs of a complete or aborted answer.

        `index` is the answer's index among the answers to its prompt; the prompt's tokens are counted with index 0.
        """
        earlier = self.totals.get(stats.cohort, RequestStats())
        self.totals[stats.cohort] = sum_stats(((0, earlier), (index, stats)))
        labels = _method_labels(stats)
        for field, (name, *_) in _COST_COUNTERS.items():
            self.inc(name, getattr(stats, field), *labels)
        for field, (name, *_) in _POSITION_COUNTERS.items():
            for position, count in enumerate(getattr(stats, field)):
                self.inc(name, count, *labels, str(position))
        for length in accepted_runs(stats).elements():
            self.observe("spec_decode_accepted_run_length", length, *labels)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


def _method_labels(stats: RequestStats) -> tuple[str, str]:
    return stats.method or "none", stats.cohort


def _seconds_by_stage(stats: EngineStats) -> dict[str, float]:
    """Return the seconds of all steps by stage; "other" is scheduling and bookkeeping."""
    stages = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "accept": stats.accept_seconds}
    return stages | {"other": max(stats.step_seconds - sum(stages.values()), 0.0)}
