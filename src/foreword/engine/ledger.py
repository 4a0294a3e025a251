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

    def observe(self, part: RequestReport, seconds: StageSeconds) -> None:
        """Count a request's pass and its part of the time, with those for whom the same drafter was asked."""
        cohort = (part.asked, part.request.cohort)
        totals = self._totals.get(cohort)
        if totals is None:
            known = cohort if len(self._totals) < MAX_COHORTS else _OTHERS
            totals = self._totals.setdefault(known, CohortTotals())
        totals.passes += 1
        totals.asks += bool(part.asked)
        totals.tokens += len(part.verdict.tokens)
        totals.draft_seconds += seconds.draft
        totals.verify_seconds += seconds.verify
        totals.accept_seconds += seconds.accept

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
    seconds: StageSeconds = field(default_factory=StageSeconds)  # its part of the passes that it took part in

    def __post_init__(self) -> None:
        self.arrived = self.clock()

    def start(self, now: float) -> None:
        """A pass that it takes part in begins."""
        if self.started is None:
            self.started = now

    def observe(self, part: RequestReport, report: StepReport) -> StageSeconds:
        """Count a pass: drafting is billed to those who were asked, the rest by rows. Returns its part of the time."""
        share = part.rows / max(report.rows, 1)
        seconds = StageSeconds(
            part.draft_seconds,
            share * report.seconds.verify,
            share * report.seconds.accept,
            part.draft_seconds + share * (report.seconds.total - report.seconds.draft),
        )
        self.passes += 1
        self.seconds += seconds
        if part.verdict.tokens or part.verdict.error is not None:
            self.finished = self.clock()
            if self.first_token is None:
                self.first_token, self.first_tokens = self.finished, len(part.verdict.tokens)
                self.first_passes = self.passes
        return seconds

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
