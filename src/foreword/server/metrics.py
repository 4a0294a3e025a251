"""Prometheus metrics: vLLM's names with our prefix where they exist, and our own."""

from prometheus_client import Counter, Histogram, generate_latest

from foreword.engine.messages import EngineStats, RequestStats
from foreword.engine.outputs import accepted_runs, sum_stats
from foreword.server.engine_metrics import (
    ControlMetrics,
    MetricFamily,
    MetricMaker,
    NodeMetrics,
    ServiceMetrics,
)

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20, 50, 100)
_RUNS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
_PER_TOKEN = (0.1, 0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 1.0, 1.5, 2.0, 5.0)
_OWN = ("method", "cohort")

_ENGINE_GAUGES = {
    "running": ("num_requests_running", "Answers that the engine works on."),
    "waiting": ("num_requests_waiting", "Answers that wait for the engine."),
    "kv_usage": ("kv_cache_usage_perc", "Part of the KV pages in use; 1 is all."),
    "kv_pages_used": ("kv_cache_pages_used", "KV pages that requests hold."),
    "speculating": ("spec_decode_enabled", "0 while speculation is switched off for all requests."),
    "drafter_memory_bytes": (
        "spec_decode_drafter_memory_bytes",
        "Memory that drafters report beyond the target's.",
    ),
    "kernels_loaded": ("gpu_kernels_loaded", "Kernels that are compiled and loaded on the GPU."),
    "kernels_pending": ("gpu_kernels_pending", "Kernels that are being compiled."),
    "states_used": ("recurrent_states_used", "States of recurrent layers in use."),
    "state_checkpoints": ("recurrent_state_checkpoints", "States that the prefix cache keeps."),
}
_ENGINE_TOTALS = {
    "preemptions": ("num_preemptions", "Times that an answer lost its KV to others."),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "steps": ("engine_steps", "Steps of the engine."),
    "passes_captured": ("gpu_passes_captured", "Passes that were captured as CUDA graphs."),
    "passes_eager": ("gpu_passes_eager", "Passes that ran without the CUDA graph they could have."),
    "state_hits": ("recurrent_state_hits", "Answers that began with a state of the prefix cache."),
    "state_evictions": ("recurrent_state_evictions", "States dropped from the prefix cache to keep others."),
    "passes_cold": ("gpu_passes_cold", "Passes that were the first of their shape, or captured."),
}
"""Metrics by field of `EngineStats`."""

_COSTS = {
    "drafts": ("num_drafts", "Passes that verified draft tokens."),
    "drafted": ("num_draft_tokens", "Draft tokens that were verified."),
    "accepted": ("num_accepted_tokens", "Draft tokens that were accepted."),
    "draft_seconds": ("draft_seconds", "Time of drafting."),
    "verify_seconds": ("verify_seconds", "Time of target passes."),
    "accept_seconds": ("accept_seconds", "Time of accepting and committing."),
    "rollback_tokens": ("rollback_tokens", "Draft tokens computed and rejected."),
    "rejected_kv_bytes": ("rejected_kv_bytes", "KV bytes written for rejected draft tokens."),
    "passes": ("target_passes", "Target passes, by answers that took part."),
    "output_tokens": ("output_tokens", "Tokens of answers, for tokens per target pass."),
}
_COSTS_BY_POSITION = {
    "drafted_per_position": ("num_drafts_per_pos", "Drafts that had a token at this position."),
    "accepted_per_position": ("num_accepted_tokens_per_pos", "Accepted draft tokens by position."),
    "rejected_per_position": (
        "num_first_rejections_per_pos",
        "Drafts whose first rejected token is at this position.",
    ),
}
_LATENCIES = {
    "queue_seconds": ("request_queue_time_seconds", "Arrival at the engine to first pass."),
    "prefill_seconds": ("request_prefill_time_seconds", "First pass to first token."),
    "decode_seconds": ("request_decode_time_seconds", "First token to last."),
}
"""Metrics by field of `RequestStats`."""


class Metrics:
    """All metrics of one server."""

    def __init__(self, model_name: str) -> None:
        make = self._make = MetricMaker(model_name)
        self.registry = make.registry
        self.totals: dict[str, RequestStats] = {}  # of ended answers, by cohort
        self.in_flight = make.gauge("num_requests_in_flight", "Answers accepted and not ended.").of()
        self.ready = make.gauge("engine_ready", "1 if the engine takes requests.").of()
        self.restarts = make.gauge("engine_restarts", "Times that the engine died and was restarted.").of()
        self._engine_gauges = {field: make.gauge(*named).of() for field, named in _ENGINE_GAUGES.items()}
        self._engine_totals = {field: make.counter(*named).of() for field, named in _ENGINE_TOTALS.items()}
        self._step_seconds = make.counter(
            "engine_step_seconds", "Time of the engine's steps, by stage.", "stage"
        )
        self._faults = make.counter(
            "spec_decode_drafter_faults", "Drafts lost because the drafter failed.", "method"
        )
        self._step_faults = make.counter(
            "engine_step_faults", "Failures that the engine recovered from, by stage.", "stage"
        )
        self._make_request_metrics(make)
        self._make_speculation_metrics(make)
        self._services = ServiceMetrics(make)
        self._nodes = NodeMetrics(make)
        self._control = ControlMetrics(make)

    def _make_request_metrics(self, make: MetricMaker) -> None:
        self.success = make.counter("request_success", "Answers that ended, by reason.", "finished_reason")
        self.refused = make.counter("request_refused", "Requests refused, by status.", "status")
        self.prompt_tokens = make.counter("prompt_tokens", "Prompt tokens processed.").of()
        self.generation_tokens = make.counter("generation_tokens", "Tokens generated.").of()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return make.histogram(name, text, buckets).of()

        self.request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_output = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self.params_n = histogram("request_params_n", "n of a request.", _COUNTS)
        self.params_max = histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self.ttft = histogram(
            "time_to_first_token_seconds", "Acceptance of a request to an answer's first token.", _LONG
        )
        self.itl = histogram(
            "inter_token_latency_seconds",
            "Between deliveries of an answer, divided by the later one's tokens.",
            _SHORT,
        )
        self.tpot = histogram(
            "request_time_per_output_token_seconds",
            "First tokens to last, divided by the tokens after the first pass.",
            _SHORT,
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Acceptance to an answer's end.", _LONG)
        self._latencies = {field: histogram(*named, _LONG) for field, named in _LATENCIES.items()}
        self.inference = histogram("request_inference_time_seconds", "First pass to last token.", _LONG)

    def _make_speculation_metrics(self, make: MetricMaker) -> None:
        def counters(named: dict[str, tuple[str, str]], *labels: str) -> dict[str, MetricFamily[Counter]]:
            return {
                field: make.counter(f"spec_decode_{name}", text, *labels)
                for field, (name, text) in named.items()
            }

        self._costs = counters(_COSTS, *_OWN)
        self._costs_by_position = counters(_COSTS_BY_POSITION, *_OWN, "position")
        self._run_length = make.histogram(
            "spec_decode_accepted_run_length",
            "Draft tokens accepted by one pass that verified some.",
            _RUNS,
            *_OWN,
        )
        self._passes_per_token = make.histogram(
            "spec_decode_target_passes_per_output_token",
            "Target passes per token of an answer.",
            _PER_TOKEN,
            *_OWN,
        )

    def note_refusal(self, status: int) -> None:
        """Count a request that got an error."""
        self.refused.of(str(status)).inc()

    def note_engine(self, stats: EngineStats, restarts: int) -> None:
        """Export the engine's statistics; `restarts` identifies the engine."""
        make = self._make
        make.note_restarts(restarts)
        for field, gauge in self._engine_gauges.items():
            gauge.set(getattr(stats, field) or 0)
        for field, counter in self._engine_totals.items():
            make.catch_up(counter, getattr(stats, field))
        make.catch_up_each(self._step_seconds, _seconds_by_stage(stats))
        make.catch_up_each(self._faults, stats.drafter_faults)
        make.catch_up_each(self._step_faults, stats.step_faults)
        self._services.note_engine(stats)
        self._nodes.note(stats.draft_nodes)
        if stats.control is not None:
            self._control.note(stats.control)

    def note_outcome(self, reason: str) -> None:
        """Count an answer that has ended or was aborted."""
        self.success.of(reason).inc()

    def note_answer(self, stats: RequestStats, finish_reason: str) -> None:
        """Count a complete answer, with the engine's times."""
        self._services.note_answer(stats, finish_reason)
        self.request_output.observe(stats.output_tokens)
        for field, histogram in self._latencies.items():
            histogram.observe(getattr(stats, field))
        self.inference.observe(stats.prefill_seconds + stats.decode_seconds)
        if (later := stats.output_tokens - stats.first_tokens) > 0:
            self.tpot.observe(stats.decode_seconds / later)
        if stats.output_tokens:
            own = (stats.method or "none", stats.cohort)
            self._passes_per_token.of(*own).observe(stats.passes / stats.output_tokens)

    def note_prompt(self, tokens: int) -> None:
        """Count a processed prompt, however its answers end."""
        self.prompt_tokens.inc(tokens)
        self.request_prompt.observe(tokens)

    def note_costs(self, index: int, stats: RequestStats) -> None:
        """Count the costs of a complete or aborted answer; `index` is its index among the prompt's answers."""
        before = self.totals.get(stats.cohort, RequestStats())
        self.totals[stats.cohort] = sum_stats(((0, before), (index, stats)))
        own = (stats.method or "none", stats.cohort)
        for field, counter in self._costs.items():
            counter.of(*own).inc(getattr(stats, field))
        for field, counter in self._costs_by_position.items():
            for position, count in enumerate(getattr(stats, field)):
                counter.of(*own, str(position)).inc(count)
        observe_runs(self._run_length.of(*own), stats)

    def page(self) -> bytes:
        """Return the body of `/metrics`."""
        return generate_latest(self.registry)


def observe_runs(histogram: Histogram, stats: RequestStats) -> None:
    """Observe the accepted lengths of drafts."""
    for length in accepted_runs(stats).elements():
        histogram.observe(length)


def _seconds_by_stage(stats: EngineStats) -> dict[str, float]:
    """Return the time of steps by stage; "other" is scheduling and bookkeeping."""
    stages = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "accept": stats.accept_seconds}
    return stages | {"other": max(stats.step_seconds - sum(stages.values()), 0.0)}
