"""How likely a drafter's guesses are: a request's own, shrunk towards its cohort's, those towards the drafter's."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from foreword.control.learning.at_large import (
    PRIOR_COVERAGE,
    PRIOR_RATE,
    PRIOR_STRENGTH,
    DrafterEstimate,
)
from foreword.control.learning.fading import (
    FADING,
    FAST_FADING,
    MOST_LEVELS,
    FadingCounts,
    left_after,
)
from foreword.control.learning.rates import Rates
from foreword.speculation.confidence import CLASSES

CHANGED_STRENGTH = 6.0
"""Drafts of the drafter at large that weigh as much in a cohort's estimate as those of its own, after a change.

Few of its own count then: what is expected would else never become what is seen.
"""

SIBLING_SHARE = 0.5
"""Of what one child leaves, what the next is believed to get."""

MAX_PAIRS = 256
"""Pairs of drafter and cohort that are remembered; the one that was not seen for longest is forgotten."""

CHANGE_SLACK = 0.25
CHANGE_LIMIT = 10.0
CHANGE_DRAFTS = 500
"""The traffic has changed if what is accepted differs from what is expected by more than this, beyond a slack."""

KEPT_DRAFTS = 20.0
"""Asks that what was counted before a change weighs as much as at most: it is no longer so."""

NEW_ASKS = 30.0
"""Asks below which a cohort is new."""


class PairEstimate:
    """A drafter's guesses in one cohort."""

    def __init__(self, drafter: DrafterEstimate, cohort: str, counts: FadingCounts) -> None:
        self.drafter = drafter
        self.cohort = cohort
        self.counts = counts
        self.changes = 0  # times that the traffic was seen to change
        self.levels = 0  # that were ever judged, at least
        self.asks = 0  # that there ever were
        self._depth = 0  # levels that are asked for at most; 0: nobody has said
        self._fast_drafts = 0  # that are still forgotten fast
        self._above = self._below = 0.0  # evidence that more, or less, is accepted than expected
        self._seconds = 0.0  # of engine time, when it last faded
        self._rates: Rates | None = None

    @property
    def method(self) -> str:
        return self.drafter.method

    @property
    def rates(self) -> Rates:
        """What is believed now; the same object until `refresh`."""
        if self._rates is None:
            self._rates = self._estimate()
        return self._rates

    @property
    def is_unsettled(self) -> bool:
        """Whether the traffic is new, or has just changed."""
        return self._fast_drafts > CHANGE_DRAFTS // 2 or self.is_new

    @property
    def is_new(self) -> bool:
        return self.counts.asks < NEW_ASKS

    @property
    def is_unknown(self) -> bool:
        """Whether there is much to find out: what is new is mostly as it is elsewhere."""
        return self.is_unsettled and (bool(self._fast_drafts) or not self.drafter.is_known)

    def need(self, depth: int) -> None:
        """Drafts of so many levels will be asked for: what is believed of deeper ones is not worked out."""
        if depth > self._depth:
            self._depth = depth
            self._rates = None

    def refresh(self, seconds: float) -> None:
        """Take into account what was counted since; `seconds` is the engine's time."""
        if seconds > self._seconds:
            self.counts.fade(self.left(seconds))
            self.drafter.fade(seconds)
            self._seconds = seconds
        self._rates = None

    def left(self, seconds: float) -> float:
        """What is left of its counts at this time of the engine's."""
        return left_after(seconds - self._seconds)

    def answered(self, asked_depth: int, depth: int, kept: int | None = None) -> None:
        """An ask, how deep the answer was, and how much of it was worth verifying; 0: there was none."""
        self.asks += 1
        self.counts.answered(asked_depth, depth, depth if kept is None else kept)
        if not depth:
            self.counts.fade(self._fading())
            self.drafter.hear(self.counts)

    def judged(self, level: int, children: int, accepted: int | None) -> None:
        """A level that was reached; 0 is the first."""
        self.counts.judged(level, children, accepted)

    def finished(self, accepted: int, expected: float) -> None:
        """A draft has been judged to its end: what was accepted of it, and what was expected to be."""
        self.levels += accepted or 1
        self.counts.fade(self._fading())
        self.drafter.hear(self.counts)
        if self._fast_drafts:
            self._fast_drafts -= 1
            if self._fast_drafts > CHANGE_DRAFTS // 2:
                return  # it is still learning what has changed
        off = accepted - expected
        above, below = self._above + off - CHANGE_SLACK, self._below - off - CHANGE_SLACK
        self._above = above if above > 0 else 0.0
        self._below = below if below > 0 else 0.0
        if above > CHANGE_LIMIT or below > CHANGE_LIMIT:
            self._above = self._below = 0.0
            self._fast_drafts = CHANGE_DRAFTS
            self.changes += 1
            self.counts.fade(min(KEPT_DRAFTS / max(self.counts.asks, 1.0), 0.25))
            self._rates = None

    def _fading(self) -> float:
        return FAST_FADING if self._fast_drafts else FADING

    @property
    def _strength(self) -> float:
        if self._fast_drafts:
            return CHANGED_STRENGTH
        return self.drafter.cohort_strength

    def _estimate(self) -> Rates:
        depth = min(self._depth or MOST_LEVELS, MOST_LEVELS)
        accepted, presence = [], []
        above = above_here = PRIOR_RATE
        present = 1.0
        for level in range(depth):
            ranks, at_large = self._ranks(level, above, above_here)
            above, above_here = at_large, ranks[0]
            accepted.append(ranks)
            present = self.drafter.counts.presence(level, present, PRIOR_STRENGTH)
            presence.append(self.counts.presence(level, present, self._strength))
        drafted, coverage = self._coverages(depth)
        sure = [
            self.counts.sure_rate(one, self.drafter.sure_rate(one), self._strength) for one in range(CLASSES)
        ]
        return Rates(accepted, coverage, presence, drafted, sure)

    def _coverages(self, depth: int) -> tuple[list[float], list[float]]:
        """[level], of the asks: how often there is such a guess, and how often it is worth verifying."""
        of_all, of_these = self.drafter.counts.coverages(), self.counts.coverages()
        found: tuple[list[float], list[float]] = [], []
        for which, told in enumerate(found):
            known, here = self.drafter.coverage, 1.0
            for level in range(depth):
                known = _shrunk(of_all[level][which], of_all[level][2], known, PRIOR_STRENGTH)
                here = min(_shrunk(of_these[level][which], of_these[level][2], known, self._strength), here)
                told.append(here)
        return found

    def _ranks(self, level: int, above: float, above_here: float) -> tuple[list[float], float]:
        """The rates of siblings, and the first one's at large; `above` is that of the level above."""
        own, at_large = self.counts, self.drafter.counts
        known = self.drafter.rate(level, above)
        is_seen = level < len(own.reached)
        ranks = [own.rate(level, 0, known if is_seen else _like(known, above, above_here), self._strength)]
        before = known
        for rank in range(1, max(at_large.ranks(level), own.ranks(level))):
            one = at_large.rate(level, rank, SIBLING_SHARE * (1 - before), PRIOR_STRENGTH)
            before += one
            ranks.append(own.rate(level, rank, one, self._strength))
        return ranks, known


def _shrunk(part: float, whole: float, prior: float, strength: float) -> float:
    return (strength * prior + part) / (strength + whole)


def _like(rate: float, above: float, above_here: float) -> float:
    """A rate that this cohort has not seen: the drafter's, moved as the cohort's level above differs from it."""
    return min(rate * above_here / above, 1.0) if above > 0 else rate


def owner_of(tenant: str) -> str:
    """A tenant as files name it: to be found again by whoever knows it."""
    return hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()


class Estimates:
    """All pairs of drafter and cohort. A cohort belongs to one tenant: nothing of it shows in another's."""

    def __init__(self) -> None:
        self.drafters: dict[str, DrafterEstimate] = {}
        self.saved: dict[
            tuple[str, str, str], FadingCounts
        ] = {}  # by method, `owner_of` and cohort: of earlier times
        self.pairs: OrderedDict[tuple[str, str, str], PairEstimate] = OrderedDict()

    def pair(
        self,
        method: str,
        tenant: str,
        cohort: str,
        coverage: float = PRIOR_COVERAGE,
        told: Sequence[float] = (),
    ) -> PairEstimate:
        """What is known of the drafter for these requests.

        `coverage`, and `told` as acceptance by level, are believed of one that nobody has asked.
        """
        key = (method, tenant, cohort)
        found = self.pairs.get(key)
        if found is None:
            drafter = self.drafter(method, coverage, told)
            counts = self.saved.pop((method, owner_of(tenant), cohort), None) if self.saved else None
            if counts is None:
                counts = FadingCounts()
                drafter.new_cohort(counts)
            found = self.pairs[key] = PairEstimate(drafter, cohort, counts)
            while len(self.pairs) > MAX_PAIRS:
                _, oldest = self.pairs.popitem(last=False)
                oldest.drafter.forget(oldest.counts)
        self.pairs.move_to_end(key)
        return found

    def drafter(
        self, method: str, coverage: float = PRIOR_COVERAGE, told: Sequence[float] = ()
    ) -> DrafterEstimate:
        while len(self.drafters) >= MAX_PAIRS and method not in self.drafters:
            del self.drafters[next(iter(self.drafters))]
        found = self.drafters.setdefault(method, DrafterEstimate(method))
        found.begin_with(coverage, told)
        return found
