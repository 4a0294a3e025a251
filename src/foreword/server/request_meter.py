"""Metrics of one request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from foreword.engine.messages import AnswerDelta, NewRequest, RequestStats, cohort_of
from foreword.server.metrics import Metrics


@dataclass
class _AnswerFigures:
    """Figures of one answer, from its deltas."""

    last_at: float | None = None  # time of the last tokens
    tokens: int = 0
    passes: int = 0  # passes that committed tokens
    drafts: int = 0  # passes that verified draft tokens
    drafted: int = 0  # verified draft tokens
    accepted: int = 0  # accepted draft tokens
    is_outcome_counted: bool = False
    are_costs_counted: bool = False

    def note(self, delta: AnswerDelta) -> None:
        self.tokens += len(delta.token_ids)
        self.passes += 1
        self.drafts += delta.drafted > 0
        self.drafted += delta.drafted
        self.accepted += delta.from_draft


@dataclass
class RequestMeter:
    """Measures one request from its admission, and counts its costs, also if it fails or is aborted."""

    metrics: Metrics
    request: NewRequest
    default_method: str = ""  # the server's default drafter
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        self._method = _method(self.request, self.default_method)
        self._began = self.clock()
        self._answers = [_AnswerFigures() for _ in range(self.request.params.n)]
        self.metrics.observe("request_params_n", self.request.params.n)
        self.metrics.observe("request_params_max_tokens", self.request.params.max_tokens)

    def note(self, delta: AnswerDelta) -> None:
        """Count a delta, and at the end of an answer also its outcome and costs."""
        if delta.token_ids:
            self._note_tokens(delta, self.clock())
        if delta.finish_reason is not None:
            self.metrics.observe("e2e_request_latency_seconds", self.clock() - self._began)
            self._note_outcome(delta.index, delta.finish_reason)
            self._note_costs(delta.index, delta.stats)
            if delta.stats is not None:
                self.metrics.note_answer(delta.stats, delta.finish_reason)

    def _note_tokens(self, delta: AnswerDelta, now: float) -> None:
        figures = self._answers[delta.index]
        if figures.last_at is None:
            self.metrics.observe("time_to_first_token_seconds", now - self._began)
            if delta.index == 0:
                tokens = len(self.request.prompt_token_ids)
                self.metrics.inc("prompt_tokens", tokens)
                self.metrics.observe("request_prompt_tokens", tokens)
        else:
            self.metrics.observe(
                "inter_token_latency_seconds", (now - figures.last_at) / len(delta.token_ids)
            )
        self.metrics.inc("generation_tokens", len(delta.token_ids))
        figures.last_at = now
        figures.note(delta)

    def note_refused(self) -> None:
        """Record that the engine refused the request: it has neither outcome nor costs."""
        for figures in self._answers:
            figures.is_outcome_counted = figures.are_costs_counted = True

    def note_engine_lost(self) -> None:
        """Record that the engine died: unfinished answers count as errors, with their costs so far."""
        for index in range(len(self._answers)):
            self._note_outcome(index, "error")
            self._note_costs(index, None)

    def note_closed(self) -> None:
        """Record that no more deltas are read: unfinished answers count as aborted. `note_late` adds their costs."""
        for index in range(len(self._answers)):
            self._note_outcome(index, "abort")

    def note_late(self, item: AnswerDelta | Exception) -> None:
        """Count the costs of an answer that ended after `note_closed`; an exception means that the engine died."""
        if isinstance(item, Exception):
            self.note_engine_lost()
        else:
            self._note_costs(item.index, item.stats)

    def _note_outcome(self, index: int, reason: str) -> None:
        """Count an answer's outcome once."""
        if not self._answers[index].is_outcome_counted:
            self._answers[index].is_outcome_counted = True
            self.metrics.inc("request_success", 1, reason)

    def _note_costs(self, index: int, stats: RequestStats | None) -> None:
        """Count an answer's costs once; without the engine's statistics, from its deltas."""
        figures = self._answers[index]
        if figures.are_costs_counted:
            return
        figures.are_costs_counted = True
        if stats is None:
            stats = RequestStats(
                prompt_tokens=len(self.request.prompt_token_ids) if figures.tokens else 0,
                output_tokens=figures.tokens,
                passes=figures.passes,
                drafts=figures.drafts,
                drafted=figures.drafted,
                accepted=figures.accepted,
                rollback_tokens=figures.drafted - figures.accepted,
                method=self._method,
                cohort=cohort_of(self._method, self.request.params),
            )
        self.metrics.inc("generation_tokens", max(stats.output_tokens - figures.tokens, 0))
        self.metrics.note_costs(index, stats)


def _method(request: NewRequest, default: str) -> str:
    """Return the name of a request's drafter; empty: none."""
    setting = request.speculation
    if isinstance(setting, Mapping):
        return str(setting.get("method", default))
    return "" if setting is False else default
