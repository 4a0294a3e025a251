"""Step statistics for reports: acceptance by position in the answer, and pages held for draft tokens."""

from bisect import bisect
from dataclasses import dataclass, field

from foreword.control.reporting.figures import BANDS, Band
from foreword.speculation.report import RequestReport, StepReport

MOST_PAIRS = 256


@dataclass
class PairTotals:
    """Totals of one drafter in one cohort since the engine started."""

    asks: int = 0
    draft_seconds: float = 0.0
    _reached: list[int] = field(default_factory=lambda: [0] * len(BANDS))
    _accepted: list[int] = field(default_factory=lambda: [0] * len(BANDS))

    def observe(self, part: RequestReport) -> None:
        """Add a request's part of a step; called for every request of every step."""
        self.asks += 1
        self.draft_seconds += part.draft_seconds
        verdict = part.verdict
        if not len(verdict.draft):
            return
        accepted = len(verdict.path)
        has_stopped = len(verdict.tokens) > accepted and accepted < verdict.draft.depth
        band = bisect(BANDS, max(part.context + part.run - part.request.drafter_view.prompt_len, 0)) - 1
        self._reached[band] += accepted + has_stopped
        self._accepted[band] += accepted

    @property
    def bands(self) -> tuple[Band, ...]:
        """Return the bands reached so far."""
        found = zip(BANDS, self._reached, self._accepted, strict=True)
        return tuple(Band(*one) for one in found if one[1])


@dataclass
class SpeculationTotals:
    """Totals of all pairs, and the effect of speculation on memory."""

    page_size: int
    pairs: dict[tuple[str, str], PairTotals] = field(default_factory=dict)  # by drafter and cohort
    provisional_pages: int = 0
    provisional_peak: int = 0
    tokens: int = 0
    _seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])  # step time without and with drafts
    _preempted: list[int] = field(default_factory=lambda: [0, 0])
    _preemptions: int = 0

    def observe(self, report: StepReport, preemptions: int) -> None:
        """Add a step; `preemptions` is the total so far."""
        provisional, has_drafts = 0, False
        for part in report.with_drafts:
            nodes = len(part.verdict.draft)
            if nodes:
                has_drafts, sure = True, part.context + part.run
                provisional += -(-(sure + nodes) // self.page_size) + -sure // self.page_size
            if part.called and part.applied:
                self._pair(part.called, part.request.cohort).observe(part)
        self.tokens += report.tokens
        self.provisional_pages = provisional
        self.provisional_peak = max(self.provisional_peak, provisional)
        self._seconds[has_drafts] += report.seconds.total
        self._preempted[has_drafts] += preemptions - self._preemptions
        self._preemptions = preemptions

    def preemption_rates(self) -> tuple[float, float]:
        """Return preemptions per second of steps without and with drafts."""
        plain, speculative = (
            count / seconds if seconds else 0.0
            for count, seconds in zip(self._preempted, self._seconds, strict=True)
        )
        return plain, speculative

    def _pair(self, drafter: str, cohort: str) -> PairTotals:
        found = self.pairs.get((drafter, cohort))
        if found is None:
            if len(self.pairs) >= MOST_PAIRS:
                del self.pairs[next(iter(self.pairs))]
            found = self.pairs[drafter, cohort] = PairTotals()
        return found
