"""What every benchmark shares: turns, ratios with bounds, tables and JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, TypeVar

from foreword.errors import RequestError

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A ratio and its bounds."""

    low: float
    middle: float
    high: float


def neighbours(rates: Sequence[float], beside: Sequence[float]) -> list[float]:
    """The ratios of windows with the same number."""
    return [one / other for one, other in zip(rates, beside, strict=True)]


def bootstrap(ratios: Sequence[float], confidence: float, seed: int = 0) -> Interval:
    """The geometric mean, with the bounds of means of as many ratios drawn from these."""
    logs, rng = [log(ratio) for ratio in ratios], Random(seed)
    means = sorted(fmean(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    outside = int(RESAMPLES * (1 - confidence) / 2)
    return Interval(exp(means[outside]), exp(fmean(logs)), exp(means[-1 - outside]))


def together(confidence: float, cells: int) -> float:
    """The confidence that each of several intervals needs so that all of them hold at once."""
    return 1 - (1 - confidence) / max(cells, 1)


@dataclass(frozen=True)
class BestFixed:
    """The setting that was best on one half of the windows, and how another does beside it on the other half."""

    label: str
    ratio: Interval


def against_best(
    rates: Mapping[str, Sequence[float]], own: str, others: Sequence[str], confidence: float
) -> BestFixed:
    """Chosen on windows with even numbers and compared on odd ones: the best of many is lucky where it was chosen."""
    best = max(others, key=lambda label: sum(map(log, rates[label][::2])))
    return BestFixed(best, bootstrap(neighbours(rates[own][1::2], rates[best][1::2]), confidence))


_Found = TypeVar("_Found")


def read_output(option: str, path: Path, command: str, understand: Callable[[Any], _Found]) -> _Found:
    """What a file says, with or without the table before it; a `ValueError` of `understand` is told in one line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} {path} cannot be read: {error}") from None
    try:
        return understand(_last_object(text))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise RequestError(f"{option} {path} is not the output of `{command}`") from None


def _last_object(text: str) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return json.loads(text.strip().rpartition("\n")[2])
