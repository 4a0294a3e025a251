"""Prometheus metrics: vLLM's names behind our prefix where it has one, and what nobody else exports."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foreword.engine.messages import EngineStats, RequestStats
from foreword.engine.outputs import accepted_runs, sum_stats
from foreword.server.ops.control_metrics import ControlMetrics
from foreword.server.ops.node_metrics import NodeMetrics
from foreword.server.ops.service_metrics import ServiceMetrics

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20, 50, 100)
_RUNS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
_PER_TOKEN = (0.1, 0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 1.0, 1.5, 2.0, 5.0)
_OWN = ("model_name", "method", "cohort")


class Metrics:
    """All figures of one server."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._seen: dict[Counter, float] = {}  # totals of the running engine
        self._lives = 0  # restarts until the running engine
        self.totals: dict[str, RequestStats] = {}  # of all answers that have ended, by cohort
        self._make_gauges()
        self._make_engine_counters()
        self._make_request_metrics()
        self._make_latencies()
        self._make_speculation_metrics()
        self._services = ServiceMetrics(self.registry, model_name)
        self._nodes = NodeMetrics(self.registry, model_name)
        self._control = ControlMetrics(self.registry, model_name, self._catch_up)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters(name, text, ("model_name",)).labels(self._model)

    def _counters(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"foreword:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._histograms(name, text, buckets, ("model_name",)).labels(self._model)

    def _histograms(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str]) -> Histogram:
        return Histogram(f"foreword:{name}", text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"foreword:{name}", text, ("model_name",), registry=self.registry).labels(self._model)

    def _make_gauges(self) -> None:
        self.running = self._gauge("num_requests_running", "Answers that the engine works on.")
        self.waiting = self._gauge("num_requests_waiting", "Answers that wait for the engine.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Part of the KV pages in use; 1 is all.")
        self.kv_pages_used = self._gauge("kv_cache_pages_used", "KV pages that requests hold.")
        self.in_flight = self._gauge("num_requests_in_flight", "Answers accepted and not ended.")
        self.ready = self._gauge("engine_ready", "1 if the engine takes requests.")
        self.restarts = self._gauge("engine_restarts", "Times that the engine died and was started again.")
        self.speculating = self._gauge(
            "spec_decode_enabled", "0 while guessing is switched off for everybody."
        )
        self.drafter_memory = self._gauge(
            "spec_decode_drafter_memory_bytes", "Memory that guessing adds, as far as the drafters say."
        )

    def _make_engine_counters(self) -> None:
        """Totals that the engine itself keeps."""
        self.preemptions = self._counter(
            "num_preemptions", "Times that an answer's KV was given up for others."
        )
        self.cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.steps = self._counter("engine_steps", "Steps of the engine.")
        self.step_seconds = self._counters(
            "engine_step_seconds", "Time of the engine's steps, by stage.", ("model_name", "stage")
        )
        self.faults = self._counters(
            "spec_decode_drafter_faults", "Drafts lost because the drafter failed.", ("model_name", "method")
        )
        self.step_faults = self._counters(
            "engine_step_faults",
            "Failures that the engine recovered from, by stage.",
            ("model_name", "stage"),
        )

    def _make_request_metrics(self) -> None:
        self.success = self._counters(
            "request_success", "Answers that ended, by how.", ("model_name", "finished_reason")
        )
        self.refused = self._counters(
            "request_refused", "Requests refused, by status.", ("model_name", "status")
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens taken.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_output = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self.params_n = self._histogram("request_params_n", "n of a request.", _COUNTS)
        self.params_max = self._histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS)

    def _make_latencies(self) -> None:
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Acceptance of a request to an answer's first token.", _LONG
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds",
            "Between deliveries of an answer, divided by the later one's tokens.",
            _SHORT,
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "First tokens to last, divided by the tokens after the first pass.",
            _SHORT,
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Acceptance to an answer's end.", _LONG)
        self.queue = self._histogram(
            "request_queue_time_seconds", "Arrival at the engine to first pass.", _LONG
        )
        self.prefill = self._histogram("request_prefill_time_seconds", "First pass to first token.", _LONG)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last.", _LONG)
        self.inference = self._histogram("request_inference_time_seconds", "First pass to last token.", _LONG)

    def _make_speculation_metrics(self) -> None:
        self.drafts = self._counters("spec_decode_num_drafts", "Passes that judged guesses.", _OWN)
        self.drafted = self._counters("spec_decode_num_draft_tokens", "Guesses that were judged.", _OWN)
        self.accepted = self._counters(
            "spec_decode_num_accepted_tokens", "Guesses that were committed.", _OWN
        )
        self.accepted_at = self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Committed guesses by place in the draft.",
            (*_OWN, "position"),
        )
        self.drafted_at = self._counters(
            "spec_decode_num_drafts_per_pos", "Drafts that had a guess at this place.", (*_OWN, "position")
        )
        self.rejected_at = self._counters(
            "spec_decode_num_first_rejections_per_pos",
            "Drafts whose first guess that was not committed is at this place.",
            (*_OWN, "position"),
        )
        self.run_length = self._histograms(
            "spec_decode_accepted_run_length",
            "Guesses committed by one pass that judged some.",
            _RUNS,
            _OWN,
        )
        self.draft_seconds = self._counters("spec_decode_draft_seconds", "Time that drafting took.", _OWN)
        self.verify_seconds = self._counters("spec_decode_verify_seconds", "Time of target passes.", _OWN)
        self.accept_seconds = self._counters(
            "spec_decode_accept_seconds", "Time of judging and committing.", _OWN
        )
        self.rollback = self._counters(
            "spec_decode_rollback_tokens", "Guesses computed and thrown away.", _OWN
        )
        self.rejected_bytes = self._counters(
            "spec_decode_rejected_kv_bytes", "KV bytes written for those.", _OWN
        )
        self.passes = self._counters(
            "spec_decode_target_passes", "Target passes, by answers that took part.", _OWN
        )
        self.output_tokens = self._counters(
            "spec_decode_output_tokens", "Tokens of answers, for tokens per target pass.", _OWN
        )
        self.passes_per_token = self._histograms(
            "spec_decode_target_passes_per_output_token",
            "Target passes per token of an answer.",
            _PER_TOKEN,
            _OWN,
        )

    def note_refusal(self, status: int) -> None:
        """A request that got an error."""
        self.refused.labels(self._model, str(status)).inc()

    def note_engine(self, stats: EngineStats, restarts: int) -> None:
        """What the engine says about itself, after this many restarts."""
        if restarts != self._lives:
            self._lives = restarts
            self._seen.clear()
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.kv_usage.set(stats.kv_usage)
        self.kv_pages_used.set(stats.kv_pages_used)
        self.speculating.set(stats.speculating)
        self.drafter_memory.set(stats.drafter_memory_bytes or 0)
        self._catch_up(self.preemptions, stats.preemptions)
        self._catch_up(self.cache_queries, stats.prefix_queries)
        self._catch_up(self.cache_hits, stats.prefix_hits)
        self._catch_up(self.steps, stats.steps)
        self._catch_up_each(self.step_seconds, _seconds_by_stage(stats))
        self._catch_up_each(self.faults, stats.drafter_faults)
        self._catch_up_each(self.step_faults, stats.step_faults)
        self._services.note_engine(stats)
        self._nodes.note(stats.draft_nodes)
        if stats.control is not None:
            self._control.note(stats.control)

    def _catch_up_each(self, counters: Counter, totals: Mapping[str, float]) -> None:
        for kind, total in totals.items():
            self._catch_up(counters.labels(self._model, kind), total)

    def _catch_up(self, counter: Counter, total: float) -> None:
        """Bring a counter to the engine's own total; a fresh engine counts from zero again."""
        before = self._seen.get(counter, 0)
        if total >= before:
            counter.inc(total - before)
            self._seen[counter] = total

    def note_outcome(self, reason: str) -> None:
        """An answer has ended, or was given up."""
        self.success.labels(self._model, reason).inc()

    def note_answer(self, stats: RequestStats, finish_reason: str) -> None:
        """A whole answer, in the engine's own times."""
        self._services.note_answer(stats, finish_reason)
        self.request_output.observe(stats.output_tokens)
        self.queue.observe(stats.queue_seconds)
        self.prefill.observe(stats.prefill_seconds)
        self.decode.observe(stats.decode_seconds)
        self.inference.observe(stats.prefill_seconds + stats.decode_seconds)
        if (later := stats.output_tokens - stats.first_tokens) > 0:
            self.tpot.observe(stats.decode_seconds / later)
        if stats.output_tokens:
            labels = (self._model, stats.method or "none", stats.cohort)
            self.passes_per_token.labels(*labels).observe(stats.passes / stats.output_tokens)

    def note_prompt(self, tokens: int) -> None:
        """A prompt has been processed, whatever comes of its answers."""
        self.prompt_tokens.inc(tokens)
        self.request_prompt.observe(tokens)

    def note_costs(self, index: int, stats: RequestStats) -> None:
        """What an answer has cost, whether it is whole or was given up; `index` among the answers to its prompt."""
        before = self.totals.get(stats.cohort, RequestStats())
        self.totals[stats.cohort] = sum_stats(((0, before), (index, stats)))
        labels = (self._model, stats.method or "none", stats.cohort)
        self.draft_seconds.labels(*labels).inc(stats.draft_seconds)
        self.verify_seconds.labels(*labels).inc(stats.verify_seconds)
        self.accept_seconds.labels(*labels).inc(stats.accept_seconds)
        self.passes.labels(*labels).inc(stats.passes)
        self.output_tokens.labels(*labels).inc(stats.output_tokens)
        self.drafts.labels(*labels).inc(stats.drafts)
        self.drafted.labels(*labels).inc(stats.drafted)
        self.accepted.labels(*labels).inc(stats.accepted)
        self.rollback.labels(*labels).inc(stats.rollback_tokens)
        self.rejected_bytes.labels(*labels).inc(stats.rejected_kv_bytes)
        for position, drafted in enumerate(stats.drafted_per_position):
            self.drafted_at.labels(*labels, str(position)).inc(drafted)
        for position, accepted in enumerate(stats.accepted_per_position):
            self.accepted_at.labels(*labels, str(position)).inc(accepted)
        for position, rejected in enumerate(stats.rejected_per_position):
            self.rejected_at.labels(*labels, str(position)).inc(rejected)
        observe_runs(self.run_length.labels(*labels), stats)

    def page(self) -> bytes:
        """What `/metrics` answers."""
        return generate_latest(self.registry)


def observe_runs(histogram: Histogram, stats: RequestStats) -> None:
    """Lengths of accepted runs."""
    for length in accepted_runs(stats).elements():
        histogram.observe(length)


def _seconds_by_stage(stats: EngineStats) -> dict[str, float]:
    """Where the time of steps went; "other" is scheduling and bookkeeping."""
    stages = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "accept": stats.accept_seconds}
    return stages | {"other": max(stats.step_seconds - sum(stages.values()), 0.0)}
