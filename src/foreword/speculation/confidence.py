"""How sure a drafter is of its guesses, in a few classes: what it says counts for what it has been worth."""

from bisect import bisect_right
from math import isnan
from typing import NamedTuple

EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Between classes of what a drafter gives a guess, of 1."""

MIDDLES = (0.025, 0.1, 0.22, 0.4, 0.6, 0.78, 0.9, 0.97)
"""What the guesses of a class are given, about."""

CLASSES = len(MIDDLES)


def class_of(confidence: float) -> int:
    """Guesses of one class are taken to be right equally often, all above them being right."""
    return 0 if isnan(confidence) else bisect_right(EDGES, confidence)


class Stop(NamedTuple):
    """From where on going on is not worth it. A drafter that is given one says how sure it is of each guess."""

    rates: tuple[float, ...]  # [classes], how often their guesses are right
    # [levels], chance that all guesses so far are right below which nothing follows; what it has no number for goes on.
    least: tuple[float, ...] = ()
