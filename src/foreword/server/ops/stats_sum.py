"""Adding up what several answers cost."""

from collections.abc import Iterable
from dataclasses import fields
from itertools import zip_longest

from foreword.engine.answers.outputs import Timings
from foreword.engine.messages import AnswerDelta, RequestStats

_OF_THE_PROMPT = frozenset({"prompt_tokens", "cached_tokens"})


def sum_stats(by_answer: Iterable[tuple[int, RequestStats]]) -> RequestStats:
    """Counts and seconds of (sample index, stats) pairs, added; a prompt with several answers counts once."""
    total: dict[str, object] = {}
    for index, stats in by_answer:
        for field in fields(stats):
            value = getattr(stats, field.name)
            if field.name in _OF_THE_PROMPT and index > 0:
                continue
            total[field.name] = _added(total.get(field.name), value)
    return RequestStats(**total)  # type: ignore[arg-type]


def _added(so_far: object, value: object) -> object:
    if isinstance(value, tuple):
        before = so_far if isinstance(so_far, tuple) else ()
        return tuple(a + b for a, b in zip_longest(before, value, fillvalue=0))
    if isinstance(value, int | float):
        return value + (so_far if isinstance(so_far, int | float) else 0)
    return so_far or value


class Costs:
    """Of a request with several answers, complete when all of them have ended."""

    def __init__(self, answers: int) -> None:
        self._missing = answers
        self._ends: list[tuple[int, RequestStats]] = []

    def note(self, delta: AnswerDelta) -> bool:
        """Take a delta; True if it was the last of all."""
        if delta.stats is not None:
            self._ends.append((delta.index, delta.stats))
        self._missing -= delta.finish_reason is not None
        return self._missing == 0

    def total(self) -> RequestStats:
        """Everything so far."""
        return sum_stats(self._ends)

    def timings(self) -> Timings:
        """In llama.cpp's names. Of several prompts, everything is added up."""
        prompts = sum(index == 0 for index, _ in self._ends)
        in_order = [stats for _, stats in sorted(self._ends, key=lambda end: end[0])]
        return Timings.of(in_order if prompts == 1 else [self.total()])
