"""When things happened to a request, and what they cost."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter

from foreword.engine.messages import CohortTotals
from foreword.speculation.measured.situation import MAX_COHORTS, OTHER, cohort_name
from foreword.speculation.report import RequestReport, StageSeconds, StepReport

_OTHERS = ("", OTHER)


class CohortLedger:
    """What every cohort has brought and cost since the engine began."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], CohortTotals] = {}  # by drafter's name and kind of request

    def observe(self, report: StepReport) -> None:
        """Count the passes of requests that are still there, with those for whom the same drafter was asked."""
        cohorts: dict[tuple[str, str], list[RequestReport]] = {}
        for part in report.requests:
            if part.applied:
                cohorts.setdefault((part.asked, part.request.cohort), []).append(part)
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
class RequestLedger:
    """Times in seconds of one monotonic clock, and counts that grow with every pass."""

    clock: Callable[[], float] = perf_counter
    arrived: float = field(init=False)
    started: float | None = None  # its first pass began
    first_token: float | None = None  # its first token was committed
    first_tokens: int = 0  # tokens that were committed together with it
    first_passes: int = 0  # passes up to and with that one
    finished: float | None = None  # its newest token was committed
    passes: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    # Its part of the passes that it took part in, stage by stage: one number is added to in no time.
    _draft: float = 0.0
    _verify: float = 0.0
    _accept: float = 0.0
    _total: float = 0.0

    def __post_init__(self) -> None:
        self.arrived = self.clock()

    def start(self, now: float) -> None:
        """A pass that it takes part in begins."""
        if self.started is None:
            self.started = now

    def observe(self, part: RequestReport, report: StepReport, now: float) -> None:
        """Count a pass that is over now: drafting is billed to those who were asked, the rest by rows."""
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
        """Its part of the passes that it took part in."""
        return StageSeconds(self._draft, self._verify, self._accept, self._total)

    @property
    def queue_seconds(self) -> float:
        return (self.started or self.arrived) - self.arrived

    @property
    def prefill_seconds(self) -> float:
        """First pass to first token."""
        started = self.started or self.arrived
        return (self.first_token or started) - started

    @property
    def decode_seconds(self) -> float:
        return (self.finished or 0.0) - (self.first_token or 0.0) if self.first_token is not None else 0.0
