"""Confidence classes of draft tokens. Each class has its own measured acceptance rate."""

from bisect import bisect_right
from math import isnan
from typing import NamedTuple

EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Upper bounds of the confidence classes, in (0, 1); the last class ends at 1."""

MIDDLES = (0.025, 0.1, 0.22, 0.4, 0.6, 0.78, 0.9, 0.97)  # typical confidence of a draft token in each class

CLASSES = len(MIDDLES)


def class_of(confidence: float) -> int:
    """Return the class of a confidence (NaN: the lowest); tokens of a class share one acceptance rate.

    The rate is that of tokens whose parents are accepted.
    """
    return 0 if isnan(confidence) else bisect_right(EDGES, confidence)


class Stop(NamedTuple):
    """The rule by which a drafter ends its chain. A drafter that receives it returns its confidence in each token."""

    rates: tuple[float, ...]  # [classes], measured acceptance rate of each class
    # [levels], minimum probability that all tokens so far are accepted; below it the chain ends. Deeper levels have
    # no minimum.
    least: tuple[float, ...] = ()
