"""Classes of draft confidence: each is weighted by the acceptance rate that was measured for it."""

from bisect import bisect_right
from math import isnan
from typing import NamedTuple

EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Upper bounds of the classes of confidence, from 0 to 1."""

MIDDLES = (0.025, 0.1, 0.22, 0.4, 0.6, 0.78, 0.9, 0.97)
"""Typical confidence of the draft tokens of each class."""

CLASSES = len(MIDDLES)


def class_of(confidence: float) -> int:
    """Return the class; draft tokens of one class share an acceptance rate, given that their parents are accepted."""
    return 0 if isnan(confidence) else bisect_right(EDGES, confidence)


class Stop(NamedTuple):
    """When a drafter ends its chain. A drafter that gets one returns its confidence in each token."""

    rates: tuple[float, ...]  # [classes], their acceptance rates
    # [levels], least chance that all tokens so far are accepted; below it the chain ends. Deeper levels have no bound.
    least: tuple[float, ...] = ()
