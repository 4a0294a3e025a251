"""Totals over steps for reports: acceptance by position in the answer, KV pages for draft tokens, and preemptions."""

from bisect import bisect
from dataclasses import dataclass, field
from math import ceil

from foreword.control.reporting.figures import BANDS, Band
from foreword.speculation.report import RequestReport, StepReport

MOST_PAIRS = 256
"""Maximum number of pairs; a further one replaces the oldest."""


@dataclass
class PairTotals:
    """Totals of one drafter in one cohort since the engine started."""

    asks: int = 0  # draft requests
    draft_seconds: float = 0.0
    # By band of the answer: draft tokens whose predecessors were accepted, and accepted draft tokens.
    _reached: list[int] = field(default_factory=lambda: [0] * len(BANDS))
    _accepted: list[int] = field(default_factory=lambda: [0] * len(BANDS))

    def observe(self, report: RequestReport) -> None:
        """Add a step's report about one request that requested a draft."""
        self.asks += 1
        self.draft_seconds += report.draft_seconds
        verdict = report.verdict
        if not len(verdict.draft):
            return
        accepted = len(verdict.path)
        # The draft's next token was rejected if the target sampled another one in its place.
        has_rejected = len(verdict.tokens) > accepted and accepted < verdict.draft.depth
        text_len = report.context + report.run
        answer_position = max(text_len - report.request.drafter_view.prompt_len, 0)
        band = bisect(BANDS, answer_position) - 1
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

    page_size: int  # KV rows per page
    pairs: dict[tuple[str, str], PairTotals] = field(default_factory=dict)  # by drafter and cohort
    provisional_pages: int = 0  # KV pages that the last step held only for draft tokens
    provisional_peak: int = 0  # maximum of provisional_pages
    tokens: int = 0  # committed tokens
    # [steps without drafts, steps with drafts]
    _step_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _preemptions: list[int] = field(default_factory=lambda: [0, 0])
    _preemptions_before: int = 0  # the engine's preemptions before the current step

    def observe(self, report: StepReport, preemptions: int) -> None:
        """Add a step; `preemptions` is the engine's total, including those of this step."""
        provisional_pages, has_drafts = 0, False
        for request_report in report.with_drafts:
            draft_rows = len(request_report.verdict.draft)
            if draft_rows:
                has_drafts = True
                text_rows = request_report.context + request_report.run
                pages = ceil((text_rows + draft_rows) / self.page_size)
                provisional_pages += pages - ceil(text_rows / self.page_size)
            if request_report.called and request_report.applied:
                self._pair(request_report.called, request_report.request.cohort).observe(request_report)
        self.tokens += report.tokens
        self.provisional_pages = provisional_pages
        self.provisional_peak = max(self.provisional_peak, provisional_pages)
        self._step_seconds[has_drafts] += report.seconds.total
        self._preemptions[has_drafts] += preemptions - self._preemptions_before
        self._preemptions_before = preemptions

    def preemption_rates(self) -> tuple[float, float]:
        """Return preemptions per second of steps without drafts, and of steps with drafts."""
        plain_seconds, speculative_seconds = self._step_seconds
        plain = self._preemptions[0] / plain_seconds if plain_seconds else 0.0
        speculative = self._preemptions[1] / speculative_seconds if speculative_seconds else 0.0
        return plain, speculative

    def _pair(self, drafter: str, cohort: str) -> PairTotals:
        """Return the totals of a pair; create them if missing."""
        totals = self.pairs.get((drafter, cohort))
        if totals is None:
            if len(self.pairs) >= MOST_PAIRS:
                del self.pairs[next(iter(self.pairs))]
            totals = self.pairs[drafter, cohort] = PairTotals()
        return totals
