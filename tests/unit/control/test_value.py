"""The value function against brute force, on all small batches of a grid."""

from collections.abc import Sequence
from itertools import product

import pytest

from foreword.control.rates import Rates
from foreword.control.value import Group, Pass, best_plan

TILES = [0.0, 5.3, 5.3, 6.5, 7.2, 9.0, 9.8, 11.1, 12.4, 15.0, 16.0, 17.0, 18.0, 24.0, 25.0]
"""Seconds by rows: staircases, as on a CPU."""

SLOPED = [6.0 + 0.4 * rows for rows in range(15)]

LEVELS = 3


def call(drafter: str, levels: float, requests: int) -> float:
    return 0.3 + levels * (0.25 + 0.1 * requests)


def rate_of(here: Pass, groups: Sequence[Group], kept: Sequence[int], depth: int) -> float:
    """Expected tokens per second, over every combination of requests that get a draft."""
    some = [(group, levels) for group, levels in zip(groups, kept, strict=True) if levels]
    if not some:
        return here.drawn / here.plain
    chances = [group.rates.coverage[0] for group, _ in some]
    tokens = here.drawn + sum(sum(group.rates.gains(0)[:levels]) for group, levels in some)
    seconds = 0.0
    for drafted in product((False, True), repeat=len(some)):
        chance, rows = 1.0, 0
        for has_draft, (_, levels), often in zip(drafted, some, chances, strict=True):
            chance *= often if has_draft else 1 - often
            rows += levels if has_draft else 0
        seconds += chance * here.after(rows)
    return tokens / (seconds + call("", depth, len(some)))


def groups_of(acceptance: Sequence[float], coverage: float) -> list[Group]:
    return [Group(Rates([[rate]] * LEVELS, [coverage] * LEVELS), 1, LEVELS) for rate in acceptance]


@pytest.mark.parametrize("table", [TILES, SLOPED], ids=["tiles", "sloped"])
@pytest.mark.parametrize("coverage", [1.0, 0.5])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_plan_is_as_good_as_the_best_of_all(size: int, coverage: float, table: list[float]):
    here = Pass.of(size, size, table)
    for acceptance in product((0.2, 0.5, 0.8, 0.95), repeat=size):
        groups = groups_of(acceptance, coverage)
        found = best_plan(here, groups, call)
        kept = [worth.useful for worth in found]
        depth = max(kept)
        best = max(rate_of(here, groups, some, max(some)) for some in product(range(LEVELS + 1), repeat=size))
        planned = max(
            rate_of(here, groups, kept, depth), here.drawn / here.plain
        )  # without a gain it is turned off
        assert planned >= 0.985 * best, (acceptance, kept)


def test_the_worked_example_of_the_documentation():
    """docs/control.md: one request, a pass of 7.0 ms, and a head that is accepted at 0.7 a level."""
    here = Pass.of(1, 1, [0.0, 7.0, 7.4, 7.9, 9.0, 11.1])
    group = Group(Rates([[0.7]] * 4, [1.0] * 4), 1, 4)
    rates = {}
    for levels in range(1, 5):
        tokens = 1 + sum(0.7**level for level in range(1, levels + 1))
        rates[levels] = tokens / (here.after(levels) + 0.5 + 0.45 * levels)
    assert {levels: round(1000 * rate) for levels, rate in rates.items()} == {1: 204, 2: 235, 3: 233, 4: 207}
    (worth,) = best_plan(here, [group], lambda drafter, levels, requests: 0.5 + 0.45 * levels)
    assert (worth.useful, round(worth.gain, 2)) == (2, 0.65)
    assert (
        round((here.after(3) - here.after(2)) * rates[2], 2) == 0.26
    )  # tokens that a third one costs in the pass
    assert round(1000 * here.drawn / here.plain) == 143
