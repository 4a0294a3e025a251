"""Before anything is drafted: whether it pays to ask, how deep, and for which requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

from foreword.control.estimates import LEAST_SHIFT, MOST_SHIFT, Rates

MANY = 12
"""Drafts from which on their rows are close enough to what is expected of them."""

NEGLIGIBLE = 0.003
"""Part of a plain step that may be spent on guesses that are only compared with the text."""

DraftSeconds = Callable[[int, int], float]
"""What a call for so many levels and asks takes."""


@dataclass(frozen=True)
class Pass:
    """The next pass as it would be without guesses. What its prompt chunks take is no part of its time."""

    drawn: float  # tokens that it makes
    rows: int
    seconds: Sequence[float]  # [rows], expected time of a step; the last entry stands for all above it
    prompts: float = 0.0  # seconds of prompt chunks

    @staticmethod
    def of(drawn: int, rows: int, seconds: Sequence[float]) -> "Pass":
        """A pass over so many rows, one of them for each token that it makes and the others of prompts."""
        last = len(seconds) - 1
        return Pass(drawn, rows, seconds, seconds[min(rows, last)] - seconds[min(drawn, last)])

    def after(self, rows: float) -> float:
        """Expected time of the step with this many more rows, between whole numbers of them, too."""
        seconds, at = self.seconds, self.rows + rows
        low = int(at)
        if low + 1 >= len(seconds):
            return seconds[-1] - self.prompts
        return seconds[low] + (at - low) * (seconds[low + 1] - seconds[low]) - self.prompts

    @property
    def plain(self) -> float:
        return self.after(0)

    @property
    def per_token(self) -> float:
        """What a token takes without guesses."""
        return self.plain / max(self.drawn, 1)


@dataclass(frozen=True)
class Worth:
    """What asking a drafter for some requests promises."""

    depth: int = 0  # levels to ask for
    kept: int = 0  # of these, the ones that are worth verifying
    gain: float = 0.0  # of the requests' own speed; 0.1: a tenth faster than plain
    least_shift: int = MOST_SHIFT + 1  # least luck of a request with which asking for it pays
    draft_seconds: float = 0.0  # of the call


NO_WORTH = Worth(gain=-1.0)


def weigh(here: Pass, rates: Rates, asks: int, depth: int, draft_seconds: DraftSeconds) -> Worth:
    """The best that a drafter can do for so many requests, drafts of at most `depth` levels."""
    best, best_rate = 0, 0.0
    survival, coverage = rates.survival(0), rates.coverage
    depth = min(depth, len(survival))
    tokens = rows = 0.0
    gains = [0.0]
    for level in range(depth):
        tokens += asks * coverage[level] * survival[level]
        rows += coverage[level]
        spent = _expected_seconds(here, coverage, asks, level + 1, rows) + draft_seconds(level + 1, asks)
        rate = (here.drawn + tokens) / spent
        gains.append((tokens * here.per_token - (spent - here.plain)) / (asks * here.per_token))
        if rate > best_rate:
            best, best_rate = level + 1, rate
    if not best:
        return NO_WORTH
    asked = best
    if draft_seconds(depth, asks) - draft_seconds(best, asks) < NEGLIGIBLE * here.plain:
        asked = depth
    least = _least_shift(here, rates, asks, best, draft_seconds)
    return Worth(asked, best, gains[best], least, draft_seconds(asked, asks))


def _expected_seconds(here: Pass, coverage: Sequence[float], asks: int, levels: int, rows: float) -> float:
    """Of the step, over who has an answer and how deep it is; `rows` are expected of one ask.

    The time of the expected rows is not the expected time: where a second row is free and a third is not, a drafter
    that seldom answers would look free.
    """
    if asks == 1:
        seconds = here.plain
        for level in range(levels):
            seconds += coverage[level] * (here.after(level + 1) - here.after(level))
        return seconds
    if asks > MANY or coverage[0] <= 0 or coverage[0] >= 1:
        return here.after(asks * rows)
    some, each = coverage[0], rows / coverage[0]
    return sum(
        comb(asks, answers) * some**answers * (1 - some) ** (asks - answers) * here.after(answers * each)
        for answers in range(asks + 1)
    )


def _least_shift(here: Pass, rates: Rates, asks: int, levels: int, draft_seconds: DraftSeconds) -> int:
    """Asking for a request with less luck than this costs more than it brings."""
    rows = sum(rates.coverage[:levels])
    row = (_expected_seconds(here, rates.coverage, asks, levels, rows) - here.plain) / max(asks * rows, 1e-9)
    ask = draft_seconds(levels, asks) - (draft_seconds(levels, asks - 1) if asks > 1 else 0.0)

    def pays(shift: int) -> bool:
        survival = rates.survival(shift)
        best = value = 0.0
        for level in range(levels):
            value += rates.coverage[level] * (survival[level] * here.per_token - row)
            best = max(best, value)
        return best > ask

    low, high = LEAST_SHIFT, MOST_SHIFT + 1
    while low < high:
        middle = (low + high) // 2
        if pays(middle):
            high = middle
        else:
            low = middle + 1
    return low
