"""Adding up what several answers cost."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from foreword.control.reporting.figures import counts_of
from foreword.engine.answers.ends import OpenAnswers
from foreword.engine.answers.outputs import Timings
from foreword.engine.messages import AnswerDelta, RequestStats

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Counted = TypeVar("Counted", bound=DataclassInstance)


def add_fields(one: "Counted", other: "Counted") -> "Counted":
    """Field by field: numbers and tuples of numbers are added; of two texts the first that says something stays."""
    sums = {field.name: _added(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)}
    return replace(one, **sums)


def _added(one: Any, other: Any) -> Any:  # noqa: ANN401 - numbers, tuples of them, or texts
    if isinstance(one, tuple):
        return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
    return one or other if isinstance(one, str) else one + other


def sum_stats(by_answer: Iterable[tuple[int, RequestStats]]) -> RequestStats:
    """Counts and seconds of (sample index, stats) pairs, added; a prompt with several answers counts once."""
    total = RequestStats()
    for index, stats in by_answer:
        total = add_fields(total, replace(stats, prompt_tokens=0, cached_tokens=0) if index else stats)
    return total


def accepted_runs(stats: RequestStats) -> "Counter[int]":
    """How many passes accepted so many guesses. A run of k has those at positions 1 .. k committed, and no further."""
    return counts_of(stats.drafts, stats.accepted_per_position)


class Costs:
    """Of a request with several answers, complete when all of them have ended."""

    def __init__(self, answers: int) -> None:
        self._open = OpenAnswers(answers)
        self._ends: list[tuple[int, RequestStats]] = []

    def note(self, delta: AnswerDelta) -> bool:
        """Take a delta; True if it was the last of all."""
        if delta.stats is not None:
            self._ends.append((delta.index, delta.stats))
        return self._open.note(delta)

    def total(self) -> RequestStats:
        return sum_stats(self._ends)

    def timings(self) -> Timings:
        return Timings.of(self._ends)
