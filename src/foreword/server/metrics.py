"""Prometheus metrics: vLLM's names behind our prefix where it has one, and what nobody else exports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import AnswerDelta, NewRequest, RequestStats
from foreword.server.wire import Stats

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
        self._seen: dict[tuple[Counter, str], int] = {}  # totals of the running engine
        self._make_gauges()
        self._make_request_metrics()
        self._make_latencies()
        self._make_speculation_metrics()

    def _counter(self, name: str, text: str, labels: Sequence[str] = ("model_name",)) -> Counter:
        return Counter(f"foreword:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], own: bool = False) -> Histogram:
        labels = _OWN if own else ("model_name",)
        return Histogram(f"foreword:{name}", text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"foreword:{name}", text, ("model_name",), registry=self.registry)
        gauge.labels(self._model)
        return gauge

    def _make_gauges(self) -> None:
        self.running = self._gauge("num_requests_running", "Answers that the engine works on.")
        self.waiting = self._gauge("num_requests_waiting", "Answers that wait for the engine.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Part of the KV pages in use; 1 is all.")
        self.in_flight = self._gauge("num_requests_in_flight", "Answers accepted and not ended.")
        self.ready = self._gauge("engine_ready", "1 if the engine takes requests.")
        self.restarts = self._gauge("engine_restarts", "Times that the engine died and was started again.")

    def _make_request_metrics(self) -> None:
        self.success = self._counter(
            "request_success", "Answers that ended, by how.", ("model_name", "finished_reason")
        )
        self.refused = self._counter(
            "request_refused", "Requests refused, by status.", ("model_name", "status")
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens taken.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.preemptions = self._counter(
            "num_preemptions", "Times that an answer's KV was given up for others."
        )
        self.cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
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
            "First to last token, divided by tokens after the first.",
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
        self.drafts = self._counter("spec_decode_num_drafts", "Passes that judged guesses.", _OWN)
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Guesses that were judged.", _OWN)
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Guesses that were committed.", _OWN)
        self.accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Committed guesses by place in the draft.",
            (*_OWN, "position"),
        )
        self.rejected_at = self._counter(
            "spec_decode_num_rejected_tokens_per_pos",
            "Drafts with a guess at this place that was not committed.",
            (*_OWN, "position"),
        )
        self.run_length = self._histogram(
            "spec_decode_accepted_run_length",
            "Guesses committed by one pass that judged some.",
            _RUNS,
            own=True,
        )
        self.draft_seconds = self._counter("spec_decode_draft_seconds", "Time that drafting took.", _OWN)
        self.verify_seconds = self._counter("spec_decode_verify_seconds", "Time of target passes.", _OWN)
        self.accept_seconds = self._counter(
            "spec_decode_accept_seconds", "Time of judging and committing.", _OWN
        )
        self.rollback = self._counter(
            "spec_decode_rollback_tokens", "Guesses computed and thrown away.", _OWN
        )
        self.rejected_bytes = self._counter(
            "spec_decode_rejected_kv_bytes", "KV bytes written for those.", _OWN
        )
        self.passes = self._counter(
            "spec_decode_target_passes", "Target passes, by answers that took part.", _OWN
        )
        self.passes_per_token = self._histogram(
            "spec_decode_target_passes_per_output_token",
            "Target passes per token of an answer.",
            _PER_TOKEN,
            own=True,
        )
        self.faults = self._counter(
            "spec_decode_drafter_faults", "Drafts lost because the drafter failed.", ("model_name", "method")
        )
        self.step_faults = self._counter(
            "engine_step_faults",
            "Failures that the engine recovered from, by stage.",
            ("model_name", "stage"),
        )

    def note_refusal(self, status: int) -> None:
        """A request that got an error."""
        self.refused.labels(self._model, str(status)).inc()

    def note_engine(self, stats: Stats) -> None:
        """What the engine says about itself."""
        self.running.labels(self._model).set(stats.running)
        self.waiting.labels(self._model).set(stats.waiting)
        self.kv_usage.labels(self._model).set(stats.kv_usage)
        self._catch_up(self.faults, stats.drafter_faults)
        self._catch_up(self.step_faults, stats.step_faults)

    def _catch_up(self, counter: Counter, totals: Mapping[str, int]) -> None:
        """Bring a counter to the engine's own totals. A fresh engine counts from zero again."""
        for kind, total in totals.items():
            before = self._seen.get((counter, kind), 0)
            counter.labels(self._model, kind).inc(total - before if total >= before else total)
            self._seen[counter, kind] = total

    def note_answer(self, stats: RequestStats, cohort: str) -> None:
        """A finished answer's costs."""
        model = self._model
        self.generation_tokens.labels(model).inc(stats.output_tokens)
        self.preemptions.labels(model).inc(stats.preemptions)
        self.request_output.labels(model).observe(stats.output_tokens)
        self.queue.labels(model).observe(stats.queue_seconds)
        self.prefill.labels(model).observe(stats.prefill_seconds)
        self.decode.labels(model).observe(stats.decode_seconds)
        self.inference.labels(model).observe(stats.prefill_seconds + stats.decode_seconds)
        if stats.output_tokens > 1:
            self.tpot.labels(model).observe(stats.decode_seconds / (stats.output_tokens - 1))
        self._note_speculation(stats, (model, stats.method or "none", cohort))

    def note_prompt(self, stats: RequestStats) -> None:
        """A prompt's costs, once however many answers it has."""
        self.prompt_tokens.labels(self._model).inc(stats.prompt_tokens)
        self.cache_queries.labels(self._model).inc(stats.prompt_tokens)
        self.cache_hits.labels(self._model).inc(stats.cached_tokens)
        self.request_prompt.labels(self._model).observe(stats.prompt_tokens)

    def _note_speculation(self, stats: RequestStats, labels: tuple[str, str, str]) -> None:
        self.draft_seconds.labels(*labels).inc(stats.draft_seconds)
        self.verify_seconds.labels(*labels).inc(stats.verify_seconds)
        self.accept_seconds.labels(*labels).inc(stats.accept_seconds)
        self.passes.labels(*labels).inc(stats.passes)
        if stats.output_tokens:
            self.passes_per_token.labels(*labels).observe(stats.passes / stats.output_tokens)
        self.drafts.labels(*labels).inc(stats.drafts)
        self.drafted.labels(*labels).inc(stats.drafted)
        self.accepted.labels(*labels).inc(stats.accepted)
        self.rollback.labels(*labels).inc(stats.rollback_tokens)
        self.rejected_bytes.labels(*labels).inc(stats.rejected_kv_bytes)
        pairs = zip(stats.drafted_per_position, stats.accepted_per_position, strict=False)
        for position, (drafted, accepted) in enumerate(pairs):
            self.accepted_at.labels(*labels, str(position)).inc(accepted)
            self.rejected_at.labels(*labels, str(position)).inc(max(drafted - accepted, 0))
        observe_runs(self.run_length.labels(*labels), stats)

    def page(self) -> bytes:
        """What `/metrics` answers."""
        return generate_latest(self.registry)


def observe_runs(histogram: Histogram, stats: RequestStats) -> None:
    """Lengths of accepted runs. A run of k has its guesses at positions 1 .. k committed, and no further."""
    reached = (stats.drafts, *stats.accepted_per_position, 0)
    for length, (here, further) in enumerate(pairwise(reached)):
        for _ in range(here - further):
            histogram.observe(length)


def cohort_of(params: SamplingParams) -> str:
    """The class of requests whose acceptance is counted together: greedy ones and those that draw."""
    return "greedy" if params.temperature == 0 else "sampled"


@dataclass
class _Progress:
    """Of one answer."""

    last: float
    started: bool = False


class RequestMeter:
    """Measures one request from acceptance on."""

    def __init__(self, metrics: Metrics, model: str, request: NewRequest, accepted_at: float) -> None:
        self._metrics = metrics
        self._model = model
        self._cohort = cohort_of(request.params)
        self._began = accepted_at
        self._answers: dict[int, _Progress] = {}
        metrics.params_n.labels(model).observe(request.params.n)
        metrics.params_max.labels(model).observe(request.params.max_tokens)

    def note(self, delta: AnswerDelta) -> None:
        """An answer has grown."""
        now = monotonic()
        answer = self._answers.setdefault(delta.index, _Progress(self._began))
        if delta.token_ids:
            if answer.started:
                gap = (now - answer.last) / len(delta.token_ids)
                self._metrics.itl.labels(self._model).observe(gap)
            else:
                self._metrics.ttft.labels(self._model).observe(now - self._began)
                answer.started = True
            answer.last = now
        if delta.finish_reason is not None:
            self._metrics.success.labels(self._model, delta.finish_reason).inc()
            self._metrics.e2e.labels(self._model).observe(now - self._began)
        if delta.stats is not None:
            self._metrics.note_answer(delta.stats, self._cohort)
            if delta.index == 0:
                self._metrics.note_prompt(delta.stats)
