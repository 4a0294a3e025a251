"""Times, passes and draft tokens of requests and cohorts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from foreword.drafters.lookup.prediction import count_followed
from foreword.engine.messages import CohortTotals, RequestStats
from foreword.engine.requests.answer import AnswerState
from foreword.speculation.acceptance_stats import AcceptanceStats
from foreword.speculation.measured.situation import MAX_COHORTS, OTHER, cohort_name
from foreword.speculation.report import RequestReport, StageSeconds, StepReport

_OTHERS = ("", OTHER)  # (drafter, cohort) under which cohorts beyond the limit are counted


class CohortAccounting:
    """Tokens and costs per cohort since the engine started."""

    def __init__(self) -> None:
        # Keys: the drafter called by the pass ("": none), and the cohort of the request.
        self._totals: dict[tuple[str, str], CohortTotals] = {}

    def observe(self, step: StepReport) -> None:
        """Add a step to the totals of each drafter and cohort."""
        by_cohort: dict[tuple[str, str], list[RequestReport]] = {}
        for report in step.requests:
            if report.applied:
                by_cohort.setdefault((report.called, report.request.cohort), []).append(report)
        per_row = step.seconds_per_row
        for cohort, reports in by_cohort.items():
            totals, rows = self._totals_of(cohort), sum([report.rows for report in reports])
            totals.passes += len(reports)
            totals.tokens += sum([len(report.verdict.tokens) for report in reports])
            totals.verify_seconds += rows * per_row.verify
            totals.accept_seconds += rows * per_row.accept
            totals.draft_seconds += sum([report.draft_seconds for report in reports])
            totals.asks += len(reports) if cohort[0] else 0

    def _totals_of(self, cohort: tuple[str, str]) -> CohortTotals:
        """Return the totals of a cohort, created on first use; beyond `MAX_COHORTS`, those of all others."""
        totals = self._totals.get(cohort)
        if totals is None:
            counted_as = cohort if len(self._totals) < MAX_COHORTS else _OTHERS
            totals = self._totals.setdefault(counted_as, CohortTotals())
        return totals

    def snapshot(self) -> dict[str, CohortTotals]:
        """Return copies of the totals, by name of the cohort."""
        return {
            OTHER if cohort == _OTHERS else cohort_name(*cohort): replace(totals)
            for cohort, totals in self._totals.items()
        }


@dataclass
class Accounting:
    """Times of one request in seconds of the engine's clock, its shares of step times, and counts."""

    arrived: float = field(default_factory=perf_counter)
    started: float | None = None  # start of its first pass
    first_token: float | None = None  # when its first token was committed
    first_tokens: int = 0  # tokens committed by the pass of the first token
    first_passes: int = 0  # passes up to the first token
    finished: float | None = None  # when its newest token was committed
    passes: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0
    kv_bytes_per_row: int = 0  # bytes of one KV row in its engine
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)  # of its drafts
    # The request's share of step times in seconds, by stage; separate floats are the fastest to update.
    _draft: float = 0.0
    _verify: float = 0.0
    _accept: float = 0.0
    _total: float = 0.0

    def start(self, now: float) -> None:
        """Record the start of the first pass; later calls change nothing."""
        if self.started is None:
            self.started = now

    def observe(self, report: RequestReport, step: StepReport, now: float) -> None:
        """Add a pass. The requests of a drafter call share its time equally; all other time is divided by rows."""
        rows, per_row = report.rows, step.seconds_per_row
        self.passes += 1
        self._draft += report.draft_seconds
        self._verify += rows * per_row.verify
        self._accept += rows * per_row.accept
        self._total += report.draft_seconds + rows * per_row.total
        if report.verdict.tokens or report.verdict.error is not None:
            self.finished = now
            if self.first_token is None:
                self.first_token, self.first_tokens = self.finished, len(report.verdict.tokens)
                self.first_passes = self.passes

    @property
    def seconds(self) -> StageSeconds:
        """The request's share of step times, by stage."""
        return StageSeconds(self._draft, self._verify, self._accept, self._total)  # `observe` is not divided

    @property
    def queue_seconds(self) -> float:
        """Seconds from arrival to the first pass."""
        return (self.started or self.arrived) - self.arrived

    @property
    def prefill_seconds(self) -> float:
        """Seconds from the first pass to the first token."""
        started = self.started or self.arrived
        return (self.first_token or started) - started

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the newest one."""
        return (self.finished or 0.0) - (self.first_token or 0.0) if self.first_token is not None else 0.0

    def stats(
        self, answer: AnswerState, method: str, cohort: str, service: str, prediction: Sequence[int]
    ) -> RequestStats:
        """Return the statistics so far; `method` is reported only if the drafter was called."""
        acceptance, spent = self.acceptance, self.seconds
        method = method if acceptance.draft_requests else ""
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
            asks=acceptance.draft_requests,
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
