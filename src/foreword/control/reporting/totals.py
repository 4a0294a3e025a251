"""Totals over steps for reports: acceptance by position in the answer, KV pages for draft tokens, and preemptions."""

from bisect import bisect
from dataclasses import dataclass, field

from foreword.control.reporting.figures import BANDS, Band
from foreword.speculation.report import RequestReport, StepReport

MOST_PAIRS = 256
"""Maximum number of pairs; a further one replaces the oldest."""


@dataclass
class PairTotals:
    """Totals of one drafter in one cohort since the engine started."""

    asks: int = 0  # draft requests
    draft_seconds: float = 0.0
    # Draft tokens by band: those whose predecessors were accepted, and the accepted ones.
    _reached: list[int] = field(default_factory=lambda: [0] * len(BANDS))
    _accepted: list[int] = field(default_factory=lambda: [0] * len(BANDS))

    def observe(self, part: RequestReport) -> None:
        """Add one request of a step that requested a draft."""
        self.asks += 1
        self.draft_seconds += part.draft_seconds
        verdict = part.verdict
        if not len(verdict.draft):
            return
        accepted = len(verdict.path)
        has_rejected = len(verdict.tokens) > accepted and accepted < verdict.draft.depth
        position = max(part.context + part.run - part.request.drafter_view.prompt_len, 0)  # in the answer
        band = bisect(BANDS, position) - 1
        self._reached[band] += accepted + has_rejected
        self._accepted[band] += accepted

    @property
    def bands(self) -> tuple[Band, ...]:
        """Acceptance in the bands that drafts have reached."""
        bands = map(Band, BANDS, self._reached, self._accepted)
        return tuple(band for band in bands if band.reached)


@dataclass
class SpeculationTotals:
    """Totals of all pairs, and the effect of speculation on memory."""

    page_size: int
    pairs: dict[tuple[str, str], PairTotals] = field(default_factory=dict)  # by drafter and cohort
    provisional_pages: int = 0  # KV pages that the last step held only for draft tokens
    provisional_peak: int = 0  # maximum of provisional_pages
    tokens: int = 0  # committed
    _seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])  # step time without and with drafts
    _preempted: list[int] = field(default_factory=lambda: [0, 0])  # preemptions without and with drafts
    _preemptions: int = 0  # of all steps until the last one

    def observe(self, report: StepReport, preemptions: int) -> None:
        """Add a step; `preemptions` is the engine's total, including those of this step."""
        provisional, has_drafts = 0, False
        for part in report.with_drafts:
            nodes = len(part.verdict.draft)
            if nodes:
                has_drafts, rows = True, part.context + part.run  # rows without the draft
                # Pages with the draft minus pages without it, each rounded up.
                provisional += -(-(rows + nodes) // self.page_size) + -rows // self.page_size
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
        """Return the totals of a pair; create them if missing."""
        totals = self.pairs.get((drafter, cohort))
        if totals is None:
            if len(self.pairs) >= MOST_PAIRS:
                del self.pairs[next(iter(self.pairs))]
            totals = self.pairs[drafter, cohort] = PairTotals()
        return totals
