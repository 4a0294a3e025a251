"""Metrics of one request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from foreword.engine.messages import AnswerDelta, NewRequest, RequestStats, cohort_of
from foreword.server.metrics import Metrics


@dataclass
class _Seen:
    """Figures from the deltas of an answer."""

    last: float | None = None  # time of its last tokens
    tokens: int = 0
    passes: int = 0  # passes with tokens
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    has_ended: bool = False  # outcome counted
    is_counted: bool = False  # costs counted

    def note(self, delta: AnswerDelta) -> None:
        self.tokens += len(delta.token_ids)
        self.passes += 1
        self.drafts += delta.drafted > 0
        self.drafted += delta.drafted
        self.accepted += delta.from_draft


@dataclass
class RequestMeter:
    """Measures one request from admission, and counts its costs however it ends."""

    metrics: Metrics
    request: NewRequest
    default_method: str = ""
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        self._method = _method(self.request, self.default_method)
        self._began = self.clock()
        self._seen = [_Seen() for _ in range(self.request.params.n)]
        self.metrics.observe("request_params_n", self.request.params.n)
        self.metrics.observe("request_params_max_tokens", self.request.params.max_tokens)

    def note(self, delta: AnswerDelta) -> None:
        if delta.token_ids:
            self._note_tokens(delta, self.clock())
        if delta.finish_reason is not None:
            self.metrics.observe("e2e_request_latency_seconds", self.clock() - self._began)
            self._note_outcome(delta.index, delta.finish_reason)
            self._note_costs(delta.index, delta.stats)
            if delta.stats is not None:
                self.metrics.note_answer(delta.stats, delta.finish_reason)

    def _note_tokens(self, delta: AnswerDelta, now: float) -> None:
        seen = self._seen[delta.index]
        if seen.last is None:
            self.metrics.observe("time_to_first_token_seconds", now - self._began)
            if delta.index == 0:
                tokens = len(self.request.prompt_token_ids)
                self.metrics.inc("prompt_tokens", tokens)
                self.metrics.observe("request_prompt_tokens", tokens)
        else:
            self.metrics.observe("inter_token_latency_seconds", (now - seen.last) / len(delta.token_ids))
        self.metrics.inc("generation_tokens", len(delta.token_ids))
        seen.last = now
        seen.note(delta)

    def refused(self) -> None:
        for seen in self._seen:
            seen.has_ended = seen.is_counted = True

    def lost(self) -> None:
        """Record that the engine died: unfinished answers are errors, with costs as far as known."""
        for index, seen in enumerate(self._seen):
            if not seen.has_ended:
                self._note_outcome(index, "error")
            self._note_costs(index, None)

    def left(self) -> None:
        """Record that the client disconnected: unfinished answers count as aborted; their costs arrive later."""
        for index in range(len(self._seen)):
            self._note_outcome(index, "abort")

    def note_late(self, item: AnswerDelta | Exception) -> None:
        """Count an answer that ended after its client disconnected or its engine died."""
        if isinstance(item, Exception):
            self.lost()
        else:
            self._note_costs(item.index, item.stats)

    def _note_outcome(self, index: int, reason: str) -> None:
        if not self._seen[index].has_ended:
            self._seen[index].has_ended = True
            self.metrics.inc("request_success", 1, reason)

    def _note_costs(self, index: int, stats: RequestStats | None) -> None:
        """Count an answer's costs once; without statistics, from its deltas."""
        seen = self._seen[index]
        if seen.is_counted:
            return
        seen.is_counted = True
        if stats is None:
            stats = self._partial(seen)
        self.metrics.inc("generation_tokens", max(stats.output_tokens - seen.tokens, 0))
        self.metrics.note_costs(index, stats)

    def _partial(self, seen: _Seen) -> RequestStats:
        return RequestStats(
            prompt_tokens=len(self.request.prompt_token_ids) if seen.tokens else 0,
            output_tokens=seen.tokens,
            passes=seen.passes,
            drafts=seen.drafts,
            drafted=seen.drafted,
            accepted=seen.accepted,
            rollback_tokens=seen.drafted - seen.accepted,
            method=self._method,
            cohort=cohort_of(self._method, self.request.params),
        )


def _method(request: NewRequest, default: str) -> str:
    """Return a request's drafter; empty: none."""
    setting = request.speculation
    if isinstance(setting, Mapping):
        return str(setting.get("method", default))
    return "" if setting is False else default
