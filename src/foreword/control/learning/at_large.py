"""What is known of a drafter at large: what a cohort that nobody has seen yet begins with."""

from collections.abc import Sequence
from typing import NamedTuple

from foreword.control.learning.fading import FadingCounts, left_after
from foreword.speculation.confidence import MIDDLES

COHORT_STRENGTH = 20.0
"""Drafts of the drafter at large that weigh as much in a cohort's estimate as those of its own.

And those that all that was seen of one cohort weighs at most in what is known of the drafter at large: cohorts differ
about as much as so many drafts do by chance, so more drafts of the same one tell little more of another.
"""

LOOKUP_STRENGTH = 6.0
"""The same of one that lives on the text, not on the model: what it is worth differs far more from work to work."""

PRIOR_STRENGTH = 4.0
PRIOR_RATE = 0.6
PRIOR_COVERAGE = 0.5
"""What is believed of a drafter that nobody has asked: hopeful, so that it is tried, and soon forgotten."""

HEAD_COVERAGE = 1.0
"""The same of one that reads the target's states: it always has something to say."""

TOLD_STRENGTH = 20.0
"""Drafts that weigh as much as what a drafter's maker has measured."""

KNOWN_COHORTS = 3.0
"""Of a drafter, from which on it is known what to expect of it in a new one."""


HALF_LIFE_SECONDS = 3600.0
"""Engine time in which what a cohort has told counts half: tenants that never come back are not believed for ever."""

FADED_EVERY = 1.0
"""Seconds: more often is too small a step to matter."""


class _Share(NamedTuple):
    """What one cohort has told of a drafter, and when."""

    counts: FadingCounts
    seconds: float


class DrafterEstimate:
    """A drafter's guesses for everyone: one rate for every level, which is all that tenants share."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.coverage = PRIOR_COVERAGE  # what is believed before it was asked
        self.told: Sequence[float] = ()  # [level], acceptance that its maker has measured
        self._cohorts: dict[FadingCounts, _Share] = {}  # what each has counted, and what of it counts here
        self._counts = FadingCounts()
        self._changed: set[FadingCounts] = set()  # cohorts that have counted more since
        self._seconds = 0.0  # of engine time, when it last faded

    def begin_with(self, coverage: float, told: Sequence[float]) -> None:
        """What is believed of it before it was asked."""
        if coverage != self.coverage:
            self._changed.update(self._cohorts)
        self.coverage, self.told = coverage, told

    def new_cohort(self, counts: FadingCounts) -> None:
        """From now on this is counted of one more."""
        self._cohorts[counts] = _Share(FadingCounts(), self._seconds)
        self._changed.add(counts)

    def forget(self, counts: FadingCounts) -> None:
        """A cohort that was not seen for long; one that was saved may belong to an estimate that is no more."""
        share = self._cohorts.pop(counts, None)
        if share is not None:
            self._take_back(share)
        self._changed.discard(counts)

    def fade(self, seconds: float) -> None:
        """It is this late in the engine's time."""
        if seconds - self._seconds >= FADED_EVERY:
            self.counts.fade(
                left_after(seconds - self._seconds, HALF_LIFE_SECONDS)
            )  # what was told until now among it
            self._seconds = seconds

    def hear(self, counts: FadingCounts) -> None:
        """A cohort has counted one more draft; one that is forgotten may still have requests."""
        if counts in self._cohorts:
            self._changed.add(counts)

    @property
    def counts(self) -> FadingCounts:
        """Of all cohorts, each of which counts for a few drafts at most."""
        for counts in self._changed:
            self._take_back(self._cohorts[counts])
            share = self._cohorts[counts] = _Share(counts.at_most(self.cohort_strength), self._seconds)
            self._counts.add(share.counts, self._counts.unit)
        self._changed.clear()
        return self._counts

    def _take_back(self, share: _Share) -> None:
        left = left_after(self._seconds - share.seconds, HALF_LIFE_SECONDS)
        self._counts.add(share.counts, -self._counts.unit * left)

    @property
    def cohort_strength(self) -> float:
        return LOOKUP_STRENGTH if self.coverage < HEAD_COVERAGE else COHORT_STRENGTH

    @property
    def is_known(self) -> bool:
        return self.counts.asks >= KNOWN_COHORTS * self.cohort_strength

    def sure_rate(self, sure: int) -> float:
        """The acceptance of nodes that it gives about as much as this class says."""
        return self.counts.sure_rate(sure, MIDDLES[sure], PRIOR_STRENGTH)

    def rate(self, level: int, above: float) -> float:
        """The acceptance of a level's first node; `above` is that of the level above."""
        if level < len(self.told):
            return self.counts.rate(level, 0, self.told[level], TOLD_STRENGTH)
        return self.counts.rate(level, 0, above, PRIOR_STRENGTH)
