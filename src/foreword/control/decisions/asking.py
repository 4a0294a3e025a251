"""Before anything is drafted: whether it pays to ask, how deep, and for which requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import comb

from foreword.control.learning.rates import LEAST_SHIFT, MOST_SHIFT, Rates

MANY = 12
"""Drafts from which on their rows are close enough to what is expected of them."""

NEGLIGIBLE = 0.003
"""Part of a plain step that may be spent on guesses that are only compared with the text."""

MOST_PRICED = 128
"""Rows whose prices are looked at: the last of them stands for all beyond."""

DraftSeconds = Callable[[float, int], float]
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

    def without_prompts(self) -> "Pass":
        """The same, if nothing but its tokens' rows were computed."""
        return (
            self if self.rows == self.drawn else Pass.of(round(self.drawn), round(self.drawn), self.seconds)
        )

    def after(self, rows: float) -> float:
        """Expected time of the step with this many more rows, between whole numbers of them, too."""
        seconds, at = self.seconds, self.rows + rows
        low = int(at)
        if low + 1 >= len(seconds):
            return seconds[-1] - self.prompts
        return seconds[low] + (at - low) * (seconds[low + 1] - seconds[low]) - self.prompts

    def row_prices(self, most: int) -> list[float]:
        """[rows], seconds that one more takes where so many are added, up to `most`.

        Where the first are dearer than those behind them (a pass that no longer fits one tile) all are taken to cost
        the same: nobody would add the first alone. So they never fall.
        """
        corners: list[tuple[int, float]] = []  # of the lower hull of what so many rows take
        for rows in range(most + 1):
            seconds = self.after(rows)
            while len(corners) > 1 and _slope(*corners[-2:]) >= _slope(corners[-1], (rows, seconds)):
                corners.pop()
            corners.append((rows, seconds))
        return [_slope(one, other) for one, other in pairwise(corners) for _ in range(one[0], other[0])]

    @cached_property
    def plain(self) -> float:
        return self.after(0)

    @property
    def per_token(self) -> float:
        """What a token takes without guesses."""
        return self.plain / max(self.drawn, 1)


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


@dataclass(frozen=True)
class Worth:
    """What asking a drafter for some requests promises."""

    depth: int = 0  # levels to ask for
    kept: int = 0  # of these, the ones that are worth verifying
    gain: float = 0.0  # of the requests' own speed; 0.1: a tenth faster than plain
    saved: float = 0.0  # by one step, in the time that a token takes plainly
    least_shift: int = MOST_SHIFT + 1  # least luck of a request with which asking for it pays
    draft_seconds: float = 0.0  # of the call
    levels: float = 0.0  # that the call is expected to work for
    # [level], chance of being accepted from which on a guess is worth verifying, and going on behind it is.
    least: tuple[float, ...] = ()
    stop: tuple[float, ...] = ()


NO_WORTH = Worth(gain=-1.0)


@dataclass(frozen=True)
class Group:
    """Requests that one drafter could be asked for, of one cohort."""

    rates: Rates
    asks: int
    depth: int  # most levels
    shift: int = 0  # their luck
    is_stopping: bool = False  # whether drafts end where going on is not worth it


def worked_levels(groups: Sequence[Group], depth: int) -> float:
    """Levels that a call for drafts of at most this depth is expected to work for: as many as the deepest has."""
    depth = min(depth, max(group.depth for group in groups))
    if not all(group.is_stopping for group in groups):
        return depth
    levels = 1.0
    for level in range(1, depth):
        nobody = 1.0
        for group in groups:
            often = group.rates.drafted[level] if level < group.depth else 0.0
            nobody *= (1 - often) ** group.asks
        levels += 1 - nobody
    return levels


@dataclass(frozen=True)
class _Choice:
    """Levels of each group that are worth verifying, if drafts have at most `depth` levels."""

    depth: int
    levels: float  # that the call is expected to work for
    kept: tuple[int, ...]
    rate: float  # tokens per second
    row_seconds: float  # what a row adds to the step
    draft_seconds: float


def weigh(here: Pass, groups: Sequence[Group], draft_seconds: DraftSeconds) -> list[Worth]:
    """The best that a drafter can do for all groups together, which share its calls and the rows of a pass."""
    deepest = max(group.depth for group in groups)
    asks = sum(group.asks for group in groups)
    levels_cost = draft_seconds(deepest, asks) - draft_seconds(1, asks) >= NEGLIGIBLE * here.plain
    # A drafter that stops where going on is not worth it decides by what it sees.
    is_stopping = all(group.is_stopping for group in groups)
    depths = range(1, deepest + 1) if levels_cost and not is_stopping else [deepest]
    levels = _by_chance(groups)
    best = max(
        (_choose(here, groups, levels, depth, draft_seconds) for depth in depths),
        key=lambda choice: choice.rate,
    )
    prices = _Prices.of(here, groups, best, draft_seconds)
    found = []
    for place, group in enumerate(groups):
        least, stop = prices.least_chances(group)
        worth = _worth(here, group, place, best, groups, draft_seconds)
        found.append(replace(worth, least=least, stop=stop))
    return found


_Level = tuple[float, int, int]
"""(minus the chance that an ask brings it and it is accepted, level, place of its group)."""


def _by_chance(groups: Sequence[Group]) -> list[_Level]:
    """All levels of all groups, the likeliest first; a level is never likelier than the one above it."""
    found = []
    for place, group in enumerate(groups):
        gains = group.rates.gains(group.shift)
        found += [(-gains[level], level, place) for level in range(group.depth)]
    return found if len(groups) == 1 else sorted(found)


def _choose(
    here: Pass, groups: Sequence[Group], levels: Sequence[_Level], depth: int, draft_seconds: DraftSeconds
) -> _Choice:
    """Levels above `depth` are taken from the likeliest on."""
    worked = worked_levels(groups, depth)
    taken: list[int] = []  # places of groups, one for every level
    asked, answers, rows, drafting = 0, 0.0, 0.0, 0.0
    tokens, plain = here.drawn, here.plain
    best_rate, best_count, row_seconds, spent = 0.0, 0, 0.0, 0.0
    for chance, level, place in levels:
        if level >= depth:
            continue
        group = groups[place]
        often = group.asks * group.rates.coverage[level]
        taken.append(place)
        if level == 0:
            asked += group.asks
            answers += often
            drafting = draft_seconds(worked, asked)
        tokens -= chance * group.asks
        rows += often
        more = longer(here, asked, answers, rows)
        rate = tokens / (plain + more + drafting)
        if rate > best_rate:
            best_rate, best_count, row_seconds, spent = rate, len(taken), more / max(rows, 1e-9), drafting
    kept = [0] * len(groups)
    for place in taken[:best_count]:
        kept[place] += 1
    return _Choice(depth, worked, tuple(kept), best_rate, row_seconds, spent)


def longer(here: Pass, asks: int, answers: float, rows: float) -> float:
    """What so many rows are expected to add to a step, over how many of the asks are answered.

    The time of the expected rows is not the expected time: where a second row is free and a third is not, a drafter
    that seldom answers would look free.
    """
    if asks > MANY or not 0 < answers < asks * 0.99:
        return here.after(rows) - here.plain
    some, each = answers / asks, rows / answers
    seconds = sum(
        comb(asks, count) * some**count * (1 - some) ** (asks - count) * here.after(count * each)
        for count in range(asks + 1)
    )
    return seconds - here.plain


def _worth(
    here: Pass, group: Group, place: int, best: _Choice, groups: Sequence[Group], draft_seconds: DraftSeconds
) -> Worth:
    asked = sum(other.asks for other, kept in zip(groups, best.kept, strict=True) if kept) or group.asks
    kept = best.kept[place]
    levels = max(kept, 1)
    coverage = group.rates.coverage
    row = best.row_seconds if kept else here.after(1) - here.plain
    call = best.draft_seconds if kept else draft_seconds(best.levels, asked)
    tokens = 1 + sum(group.rates.gains(group.shift)[:levels])
    takes = (
        1 + (sum(coverage[:levels]) * row + call / asked) / here.per_token
    )  # times as long as a plain step
    gain = tokens / takes - 1
    if not kept:
        return Worth(gain=min(gain, 0.0), draft_seconds=call, levels=best.levels)
    one_more = (
        draft_seconds(best.levels, asked) - draft_seconds(best.levels, asked - 1) if asked > 1 else call
    )
    all_levels = best.levels if group.depth == best.depth else worked_levels(groups, group.depth)
    asks_all = draft_seconds(all_levels, asked) - call < NEGLIGIBLE * here.plain
    depth = group.depth if asks_all else best.depth
    shift = _least_shift(here, group.rates, kept, row, one_more)
    return Worth(depth, kept, gain, tokens - takes, shift, call, best.levels)


@dataclass(frozen=True)
class _Prices:
    """What one more guess takes where the drafter does its best."""

    rows: Sequence[float]  # [level], seconds of its row
    level: float  # seconds of drafting it, for those that go on
    rate: float  # tokens per second

    @staticmethod
    def of(here: Pass, groups: Sequence[Group], best: _Choice, draft_seconds: DraftSeconds) -> "_Prices":
        asks, rows, before = sum(group.asks for group in groups), [], 0.0
        deepest = max(group.depth for group in groups)
        known: dict[int, list[float]] = {}  # by how many rows are added at most
        for level in range(deepest):
            deep = [group for group in groups if level < group.depth]
            # One that is alone has a row for every level above, and may go on to the last. Of several, some have ended
            # there: rows behind a dear one do not make it cheaper if nobody is left to fill them.
            often = sum([group.asks * group.rates.drafted[level] for group in deep])
            most = deepest if asks == 1 else min(round(before) + max(round(often), 1), MOST_PRICED)
            if most not in known:
                known[most] = here.row_prices(most)
            rows.append(known[most][min(round(before), most - 1)])
            before += 1 if asks == 1 else sum([group.asks * group.rates.coverage[level] for group in deep])
        # Those that go on share what a level takes.
        deep = [group for group in groups if group.depth > 1]
        going = max(round(sum([group.asks * group.rates.drafted[1] for group in deep])), 1)
        another = max(draft_seconds(2, going) - draft_seconds(1, going), 0.0) / going
        return _Prices(rows, another, max(best.rate, here.drawn / here.plain))

    def least_chances(self, group: Group) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """[level], how likely a guess has to be to be worth verifying, and for going on behind it to be worth it."""
        if not group.depth:
            return (), ()
        least = [seconds * self.rate for seconds in self.rows[: group.depth]]
        expected = group.rates.expected
        following = zip([*least[1:], least[-1]], [*expected[1 : group.depth], expected[-1]], strict=True)
        stop = [(own + self.level * self.rate) / max(right, 0.01) for own, right in following]
        return tuple(least), tuple(stop)


def _least_shift(here: Pass, rates: Rates, levels: int, row: float, ask: float) -> int:
    """Asking for a request with less luck than this costs more than it brings."""

    def pays(shift: int) -> bool:
        gains = rates.gains(shift)
        best = value = 0.0
        for level in range(levels):
            value += gains[level] * here.per_token - rates.coverage[level] * row
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


def best_case(here: Pass, group: Group, draft_seconds: DraftSeconds) -> float:
    """The gain if there were always a draft and all of it were right: below 0 there is nothing to find out."""
    best, plain = -1.0, here.drawn / here.plain
    for levels in range(1, group.depth + 1):
        takes = here.after(group.asks * levels) + draft_seconds(levels, group.asks)
        best = max(best, (here.drawn + group.asks * levels) / takes / plain - 1)
    return best
