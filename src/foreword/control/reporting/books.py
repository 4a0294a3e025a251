"""What steps tell that nobody else counts: runs, depths and places of guesses, pages held for them."""

from collections import Counter
from dataclasses import dataclass, field

from foreword.control.reporting.figures import BANDS, Band
from foreword.speculation.report import RequestReport, StepReport

MOST_PAIRS = 256


@dataclass
class PairBooks:
    """Of one drafter in one cohort, since the engine began."""

    asks: int = 0
    drafts: int = 0
    draft_seconds: float = 0.0
    depths: Counter[int] = field(default_factory=Counter)  # of judged drafts
    runs: Counter[int] = field(default_factory=Counter)  # guesses that a pass accepted
    _reached: list[int] = field(default_factory=lambda: [0] * len(BANDS))
    _accepted: list[int] = field(default_factory=lambda: [0] * len(BANDS))

    def observe(self, part: RequestReport) -> None:
        self.asks += 1
        self.draft_seconds += part.draft_seconds
        judged, accepted = part.verdict.judged, len(part.verdict.path)
        if not judged.depth:
            return
        self.drafts += 1
        self.depths[judged.depth] += 1
        self.runs[accepted] += 1
        place = part.context + part.run - part.request.prompt_len
        band = sum(place >= first for first in BANDS[1:])
        self._reached[band] += min(accepted + 1, judged.depth)
        self._accepted[band] += accepted

    @property
    def bands(self) -> tuple[Band, ...]:
        """Those that were ever reached."""
        found = zip(BANDS, self._reached, self._accepted, strict=True)
        return tuple(Band(*one) for one in found if one[1])


@dataclass
class SpeculationBooks:
    """Of all pairs, and what guessing does to the memory of others."""

    page_size: int
    pairs: dict[tuple[str, str], PairBooks] = field(default_factory=dict)  # by drafter and cohort
    provisional_pages: int = 0
    provisional_peak: int = 0
    tokens: int = 0
    _seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of steps without and with guesses
    _preempted: list[int] = field(default_factory=lambda: [0, 0])
    _preemptions: int = 0

    def observe(self, report: StepReport, preemptions: int) -> None:
        """A step, and all preemptions so far."""
        guesses = 0
        self.provisional_pages = 0
        for part in report.requests:
            guesses += len(part.draft)
            self.tokens += len(part.verdict.tokens)
            sure = part.context + part.run
            self.provisional_pages += self._pages(sure + len(part.draft)) - self._pages(sure)
            if part.asked and part.applied:
                self._pair(part.asked, part.request.cohort).observe(part)
        self.provisional_peak = max(self.provisional_peak, self.provisional_pages)
        self._seconds[guesses > 0] += report.seconds.total
        self._preempted[guesses > 0] += preemptions - self._preemptions
        self._preemptions = preemptions

    def preemption_rates(self) -> tuple[float, float]:
        """Per second of steps without guesses, and with them."""
        plain, guessing = (
            count / seconds if seconds else 0.0
            for count, seconds in zip(self._preempted, self._seconds, strict=True)
        )
        return plain, guessing

    def _pages(self, rows: int) -> int:
        return -(-rows // self.page_size)

    def _pair(self, drafter: str, cohort: str) -> PairBooks:
        key = (drafter, cohort)
        if key not in self.pairs and len(self.pairs) >= MOST_PAIRS:
            del self.pairs[next(iter(self.pairs))]
        return self.pairs.setdefault(key, PairBooks())
