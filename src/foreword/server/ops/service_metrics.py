"""How each class of service fares."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from foreword.engine.messages import EngineStats, RequestStats

_LABELS = ("model_name", "service")
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)


class ServiceMetrics:
    """By the names of the policy file; as many as it has classes."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name
        self._known: set[str] = set()  # classes that had requests
        self.running = Gauge(
            "foreword:service_requests_running", "Answers worked on.", _LABELS, registry=registry
        )
        self.waiting = Gauge(
            "foreword:service_requests_waiting", "Answers that wait.", _LABELS, registry=registry
        )
        self.ended = Counter(
            "foreword:service_requests",
            "Answers that ended, by how.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        self.tokens = Counter(
            "foreword:service_generation_tokens", "Tokens generated.", _LABELS, registry=registry
        )
        self.preemptions = Counter(
            "foreword:service_preemptions",
            "Times that an answer was put off and computed again.",
            _LABELS,
            registry=registry,
        )
        self.queue = Histogram(
            "foreword:service_queue_time_seconds",
            "Arrival at the engine to first pass.",
            _LABELS,
            buckets=_LONG,
            registry=registry,
        )
        self.first = Histogram(
            "foreword:service_time_to_first_token_seconds",
            "Arrival at the engine to the first token.",
            _LABELS,
            buckets=_LONG,
            registry=registry,
        )
        self.tpot = Histogram(
            "foreword:service_time_per_output_token_seconds",
            "First tokens to last, divided by the tokens after the first pass.",
            _LABELS,
            buckets=_SHORT,
            registry=registry,
        )

    def note_engine(self, stats: EngineStats) -> None:
        self._known |= set(stats.services)
        for name in self._known:
            running, waiting = stats.services.get(name, (0, 0))
            self.running.labels(self._model, name).set(running)
            self.waiting.labels(self._model, name).set(waiting)

    def note_answer(self, stats: RequestStats, finish_reason: str) -> None:
        """A whole answer, in the engine's own times."""
        labels = (self._model, stats.service)
        self.ended.labels(*labels, finish_reason).inc()
        self.tokens.labels(*labels).inc(stats.output_tokens)
        self.preemptions.labels(*labels).inc(stats.preemptions)
        self.queue.labels(*labels).observe(stats.queue_seconds)
        if stats.output_tokens:
            self.first.labels(*labels).observe(stats.queue_seconds + stats.prefill_seconds)
        if (later := stats.output_tokens - stats.first_tokens) > 0:
            self.tpot.labels(*labels).observe(stats.decode_seconds / later)
