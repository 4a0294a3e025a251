"""Times, passes and draft tokens of requests and cohorts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from foreword.drafters.lookup.prediction import count_followed
from foreword.engine.messages import CohortTotals, RequestStats
from foreword.engine.requests.answer import AnswerState
from foreword.speculation.measured.acceptance_stats import AcceptanceStats
from foreword.speculation.measured.situation import MAX_COHORTS, OTHER, cohort_name
from foreword.speculation.report import RequestReport, StageSeconds, StepReport

_OTHERS = ("", OTHER)


class CohortAccounting:
    """Tokens and costs per cohort since the engine started."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], CohortTotals] = {}  # by drafter and request kind

    def observe(self, report: StepReport) -> None:
        """Add a step to the totals of each drafter that was called and each kind of request."""
        cohorts: dict[tuple[str, str], list[RequestReport]] = {}
        for part in report.requests:
            if part.applied:
                cohorts.setdefault((part.called, part.request.cohort), []).append(part)
        per_row = report.seconds_per_row
        for cohort, parts in cohorts.items():
            totals, rows = self._of(cohort), sum([part.rows for part in parts])
            totals.passes += len(parts)
            totals.tokens += sum([len(part.verdict.tokens) for part in parts])
            totals.verify_seconds += rows * per_row.verify
            totals.accept_seconds += rows * per_row.accept
            totals.draft_seconds += sum([part.draft_seconds for part in parts])
            totals.asks += len(parts) if cohort[0] else 0

    def _of(self, cohort: tuple[str, str]) -> CohortTotals:
        totals = self._totals.get(cohort)
        if totals is None:
            known = cohort if len(self._totals) < MAX_COHORTS else _OTHERS
            totals = self._totals.setdefault(known, CohortTotals())
        return totals

    def snapshot(self) -> dict[str, CohortTotals]:
        return {
            OTHER if cohort == _OTHERS else cohort_name(*cohort): replace(totals)
            for cohort, totals in self._totals.items()
        }


@dataclass
class Accounting:
    """Times of one request (seconds, monotonic clock) and counts per pass."""

    arrived: float = field(default_factory=perf_counter)
    started: float | None = None  # start of its first pass
    first_token: float | None = None  # when its first token was committed
    first_tokens: int = 0  # tokens committed in that pass
    first_passes: int = 0  # passes up to that one
    finished: float | None = None  # when its newest token was committed
    passes: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0
    kv_bytes_per_row: int = 0  # of its engine
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)  # of its drafts
    # Its share of step times, by stage; separate floats are the fastest to update.
    _draft: float = 0.0
    _verify: float = 0.0
    _accept: float = 0.0
    _total: float = 0.0

    def start(self, now: float) -> None:
        """Record the start of its first pass."""
        if self.started is None:
            self.started = now

    def observe(self, part: RequestReport, report: StepReport, now: float) -> None:
        """Add a pass. Draft time is divided between the requests of a call, all other time by rows."""
        rows, per_row = part.rows, report.seconds_per_row
        self.passes += 1
        self._draft += part.draft_seconds
        self._verify += rows * per_row.verify
        self._accept += rows * per_row.accept
        self._total += part.draft_seconds + rows * per_row.total
        if part.verdict.tokens or part.verdict.error is not None:
            self.finished = now
            if self.first_token is None:
                self.first_token, self.first_tokens = self.finished, len(part.verdict.tokens)
                self.first_passes = self.passes

    @property
    def seconds(self) -> StageSeconds:
        return StageSeconds(self._draft, self._verify, self._accept, self._total)

    @property
    def queue_seconds(self) -> float:
        return (self.started or self.arrived) - self.arrived

    @property
    def prefill_seconds(self) -> float:
        started = self.started or self.arrived
        return (self.first_token or started) - started

    @property
    def decode_seconds(self) -> float:
        return (self.finished or 0.0) - (self.first_token or 0.0) if self.first_token is not None else 0.0

    def stats(
        self, answer: AnswerState, method: str, cohort: str, service: str, prediction: Sequence[int]
    ) -> RequestStats:
        """Return the statistics so far; `method` is reported only if the drafter was called."""
        acceptance, spent = self.acceptance, self.seconds
        method = method if acceptance.asks else ""
        has_ended = answer.finish_reason is not None
        predicted = count_followed(prediction, answer.output_ids) if prediction and has_ended else 0
        discarded = acceptance.drafted + acceptance.unjudged - acceptance.accepted
        return RequestStats(
            prompt_tokens=answer.prompt_len,
            cached_tokens=self.cached_tokens,
            output_tokens=len(answer.tokens) - answer.prompt_len,
            first_tokens=self.first_tokens,
            first_passes=self.first_passes or self.passes,
            queue_seconds=self.queue_seconds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            draft_seconds=spent.draft,
            verify_seconds=spent.verify,
            accept_seconds=spent.accept,
            passes=self.passes,
            asks=acceptance.asks,
            drafts=acceptance.drafts,
            drafted=acceptance.drafted,
            accepted=acceptance.accepted,
            drafted_per_position=tuple(acceptance.drafted_per_position),
            accepted_per_position=tuple(acceptance.accepted_per_position),
            rejected_per_position=tuple(acceptance.rejected_per_position),
            rollback_tokens=discarded,
            rejected_kv_bytes=discarded * self.kv_bytes_per_row,
            accepted_prediction_tokens=predicted,
            rejected_prediction_tokens=len(prediction) - predicted if has_ended else 0,
            preemptions=self.preemptions,
            method=method,
            cohort=cohort_name(method, cohort),
            service=service,
        )
