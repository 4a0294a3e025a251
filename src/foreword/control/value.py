"""Expected tokens per second of a batch, and the drafts that maximize it: pure functions.

`best_plan` adds levels of drafts in the order of their marginal gain and evaluates every prefix of that order, because
costs are staircases.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import comb

from foreword.control.rates import LEAST_SHIFT, MOST_SHIFT, Rates

MANY_REQUESTS = 12
"""Draft requests from which on the expected rows stand for their distribution."""

NEGLIGIBLE = 0.003
"""Part of a plain step that may be spent on draft tokens that are only compared with the text."""

MOST_PRICED = 128
"""Rows whose marginal cost is worked out: the last of them stands for all beyond."""

DraftSeconds = Callable[[float, int], float]
"""Expected time of a call for so many levels and requests."""


@dataclass(frozen=True)
class Pass:
    """The next pass as it would be without drafts. The time of its prompts is no part of its time."""

    drawn: float  # tokens that it makes
    rows: int
    seconds: Sequence[float]  # [rows], expected time of a step; the last entry stands for all above it
    prompts: float = 0.0  # seconds of prompts

    @staticmethod
    def of(drawn: int, rows: int, seconds: Sequence[float]) -> "Pass":
        """Return a pass over so many rows, one of them for each token that it makes and the others of prompts."""
        last = len(seconds) - 1
        return Pass(drawn, rows, seconds, seconds[min(rows, last)] - seconds[min(drawn, last)])

    def without_prompts(self) -> "Pass":
        """Return the same pass, if nothing but its tokens' rows were computed."""
        if self.rows == self.drawn:
            return self
        return Pass.of(round(self.drawn), round(self.drawn), self.seconds)

    def after(self, rows: float) -> float:
        """Return the expected time of the step with this many more rows, interpolated."""
        seconds, at = self.seconds, self.rows + rows
        low = int(at)
        if low + 1 >= len(seconds):
            return seconds[-1] - self.prompts
        return seconds[low] + (at - low) * (seconds[low + 1] - seconds[low]) - self.prompts

    def row_prices(self, most: int) -> list[float]:
        """Return [rows] the marginal seconds of a row where so many are added, up to `most`; they never fall.

        Where the first rows cost more than those after them (a pass that no longer fits one tile) all are taken to cost
        the same: the first would not be added alone.
        """
        corners: list[tuple[int, float]] = []  # of the lower convex hull
        for rows in range(most + 1):
            seconds = self.after(rows)
            while len(corners) > 1 and _slope(*corners[-2:]) >= _slope(corners[-1], (rows, seconds)):
                corners.pop()
            corners.append((rows, seconds))
        return [_slope(one, other) for one, other in pairwise(corners) for _ in range(one[0], other[0])]

    @cached_property
    def plain(self) -> float:
        """Expected time of the step without drafts."""
        return self.after(0)

    @property
    def per_token(self) -> float:
        """Expected time of a token without drafts."""
        return self.plain / max(self.drawn, 1)


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


@dataclass(frozen=True)
class Worth:
    """The expected benefit of one drafter for requests of one cohort, and the prices that a draft is cut by."""

    depth: int = 0  # levels to request
    kept: int = 0  # of these, the ones with a net benefit
    gain: float = 0.0  # of the requests' speed over plain decoding; 0.1: a tenth faster
    saved: float = 0.0  # by one step, in the time of a plain token
    least_shift: int = (
        MOST_SHIFT + 1
    )  # acceptance ratio of a request from which on drafting for it has a benefit
    draft_seconds: float = 0.0  # of the call
    levels: float = 0.0  # that the call is expected to work for
    # [level], chance of acceptance from which on a draft token is verified, and drafting goes on after it.
    least: tuple[float, ...] = ()
    stop: tuple[float, ...] = ()


NO_WORTH = Worth(gain=-1.0)


@dataclass(frozen=True)
class Group:
    """Requests of one cohort that a drafter could draft for."""

    rates: Rates
    asks: int  # requests
    depth: int  # most levels
    shift: int = 0  # their acceptance ratio
    is_stopping: bool = False  # whether the drafter ends drafts itself where going on has no benefit


def longer(here: Pass, asks: int, answers: float, rows: float) -> float:
    """Return the expected time that so many rows add to a step, over how many draft requests get a draft.

    The time of the expected rows is not the expected time: where a second row is free and a third is not, a drafter
    that seldom has a draft would look free.
    """
    if asks > MANY_REQUESTS or not 0 < answers < asks * 0.99:
        return here.after(rows) - here.plain
    some, each = answers / asks, rows / answers
    seconds = sum(
        comb(asks, count) * some**count * (1 - some) ** (asks - count) * here.after(count * each)
        for count in range(asks + 1)
    )
    return seconds - here.plain


def worked_levels(groups: Sequence[Group], depth: int) -> float:
    """Return the levels that a call for drafts of at most this depth is expected to work for: those of the deepest."""
    depth = min(depth, max(group.depth for group in groups))
    if not all(group.is_stopping for group in groups):
        return depth
    levels = 1.0
    for level in range(1, depth):
        none_drafts = 1.0
        for group in groups:
            often = group.rates.drafted[level] if level < group.depth else 0.0
            none_drafts *= (1 - often) ** group.asks
        levels += 1 - none_drafts
    return levels


@dataclass(frozen=True)
class _Choice:
    """The best levels of each group to verify, if drafts have at most `depth` levels."""

    depth: int
    levels: float  # that the call is expected to work for
    kept: tuple[int, ...]
    rate: float  # tokens per second
    row_seconds: float  # that a row adds to the step
    draft_seconds: float


_Level = tuple[float, int, int]
"""(minus the expected accepted tokens of a draft request at this level, level, place of its group)."""


def best_plan(here: Pass, groups: Sequence[Group], draft_seconds: DraftSeconds) -> list[Worth]:
    """Return the best that a drafter can do for all groups together, which share its calls and the rows of a pass."""
    deepest = max(group.depth for group in groups)
    asks = sum(group.asks for group in groups)
    levels_cost = draft_seconds(deepest, asks) - draft_seconds(1, asks) >= NEGLIGIBLE * here.plain
    # A drafter that stops itself decides by what it sees.
    is_stopping = all(group.is_stopping for group in groups)
    depths = range(1, deepest + 1) if levels_cost and not is_stopping else [deepest]
    levels = _by_gain(groups)
    best = max(
        (_best_prefix(here, groups, levels, depth, draft_seconds) for depth in depths),
        key=lambda choice: choice.rate,
    )
    prices = _Prices.of(here, groups, best, draft_seconds)
    found = []
    for place, group in enumerate(groups):
        least, stop = prices.least_chances(group)
        worth = _worth(here, group, place, best, groups, draft_seconds)
        found.append(replace(worth, least=least, stop=stop))
    return found


def _by_gain(groups: Sequence[Group]) -> list[_Level]:
    """Return all levels of all groups in the order of their gain; a level never has more than the one above it."""
    found = []
    for place, group in enumerate(groups):
        gains = group.rates.gains(group.shift)
        found += [(-gains[level], level, place) for level in range(group.depth)]
    return found if len(groups) == 1 else sorted(found)


def _best_prefix(
    here: Pass, groups: Sequence[Group], levels: Sequence[_Level], depth: int, draft_seconds: DraftSeconds
) -> _Choice:
    """Return the prefix of the levels up to `depth` with the most tokens per second."""
    worked = worked_levels(groups, depth)
    taken: list[int] = []  # places of groups, one for every level
    asked, answers, rows, drafting = 0, 0.0, 0.0, 0.0
    tokens, plain = here.drawn, here.plain
    best_rate, best_count, row_seconds, spent = 0.0, 0, 0.0, 0.0
    for gain, level, place in levels:
        if level >= depth:
            continue
        group = groups[place]
        often = group.asks * group.rates.coverage[level]
        taken.append(place)
        if level == 0:
            asked += group.asks
            answers += often
            drafting = draft_seconds(worked, asked)
        tokens -= gain * group.asks
        rows += often
        more = longer(here, asked, answers, rows)
        rate = tokens / (plain + more + drafting)
        if rate > best_rate:
            best_rate, best_count, row_seconds, spent = rate, len(taken), more / max(rows, 1e-9), drafting
    kept = [0] * len(groups)
    for place in taken[:best_count]:
        kept[place] += 1
    return _Choice(depth, worked, tuple(kept), best_rate, row_seconds, spent)


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
    takes = 1 + (sum(coverage[:levels]) * row + call / asked) / here.per_token  # in plain steps
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
    """The marginal cost of a draft token in the best plan."""

    rows: Sequence[float]  # [level], seconds of its row
    level: float  # seconds of drafting it, for each request that goes on
    rate: float  # tokens per second

    @staticmethod
    def of(here: Pass, groups: Sequence[Group], best: _Choice, draft_seconds: DraftSeconds) -> "_Prices":
        asks, rows, before = sum(group.asks for group in groups), [], 0.0
        deepest = max(group.depth for group in groups)
        known: dict[int, list[float]] = {}  # by how many rows are added at most
        for level in range(deepest):
            deep = [group for group in groups if level < group.depth]
            # One request alone has a row for every level above, and may go on to the last. Of several, some have ended
            # there: rows after an expensive one do not make it cheaper if no request is left to fill them.
            often = sum([group.asks * group.rates.drafted[level] for group in deep])
            most = deepest if asks == 1 else min(round(before) + max(round(often), 1), MOST_PRICED)
            if most not in known:
                known[most] = here.row_prices(most)
            rows.append(known[most][min(round(before), most - 1)])
            before += 1 if asks == 1 else sum([group.asks * group.rates.coverage[level] for group in deep])
        # The requests that go on share the cost of a level.
        deep = [group for group in groups if group.depth > 1]
        going = max(round(sum([group.asks * group.rates.drafted[1] for group in deep])), 1)
        another = max(draft_seconds(2, going) - draft_seconds(1, going), 0.0) / going
        return _Prices(rows, another, max(best.rate, here.drawn / here.plain))

    def least_chances(self, group: Group) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return [level] the chance from which on a token is verified, and from which on drafting goes on after it."""
        if not group.depth:
            return (), ()
        least = [seconds * self.rate for seconds in self.rows[: group.depth]]
        expected = group.rates.expected
        following = zip([*least[1:], least[-1]], [*expected[1 : group.depth], expected[-1]], strict=True)
        stop = [(own + self.level * self.rate) / max(right, 0.01) for own, right in following]
        return tuple(least), tuple(stop)


def _least_shift(here: Pass, rates: Rates, levels: int, row: float, call: float) -> int:
    """Return the acceptance ratio below which drafting for a request costs more than it brings."""

    def has_benefit(shift: int) -> bool:
        gains = rates.gains(shift)
        best = value = 0.0
        for level in range(levels):
            value += gains[level] * here.per_token - rates.coverage[level] * row
            best = max(best, value)
        return best > call

    low, high = LEAST_SHIFT, MOST_SHIFT + 1
    while low < high:
        middle = (low + high) // 2
        if has_benefit(middle):
            high = middle
        else:
            low = middle + 1
    return low


def best_case(here: Pass, group: Group, draft_seconds: DraftSeconds) -> float:
    """Return the gain if there were always a draft and all of it were accepted: below 0 exploration is useless."""
    best, plain = -1.0, here.drawn / here.plain
    for levels in range(1, group.depth + 1):
        takes = here.after(group.asks * levels) + draft_seconds(levels, group.asks)
        best = max(best, (here.drawn + group.asks * levels) / takes / plain - 1)
    return best
