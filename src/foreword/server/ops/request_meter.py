"""One request's way through the server, as the metrics see it."""

from time import monotonic

from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.server.ops.metrics import Metrics


class RequestMeter:
    """Measures one request from acceptance on."""

    def __init__(self, metrics: Metrics, model: str, request: NewRequest, accepted_at: float) -> None:
        self._metrics = metrics
        self._model = model
        self._began = accepted_at
        self._last: dict[int, float] = {}  # answer -> when its last tokens came
        metrics.params_n.observe(request.params.n)
        metrics.params_max.observe(request.params.max_tokens)

    def note(self, delta: AnswerDelta) -> None:
        """An answer has grown."""
        now = monotonic()
        if delta.token_ids:
            last = self._last.get(delta.index)
            if last is None:
                self._metrics.ttft.observe(now - self._began)
            else:
                self._metrics.itl.observe((now - last) / len(delta.token_ids))
            self._last[delta.index] = now
        if delta.finish_reason is not None:
            self._note_end(delta, now)

    def _note_end(self, delta: AnswerDelta, now: float) -> None:
        self._metrics.success.labels(self._model, delta.finish_reason).inc()
        self._metrics.e2e.observe(now - self._began)
        if delta.stats is not None:
            self._metrics.note_answer(delta.stats)
            if delta.index == 0:
                self._metrics.note_prompt(delta.stats)
