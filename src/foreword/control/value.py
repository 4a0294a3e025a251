"""Expected tokens per second of a batch, and the drafts that maximise it: pure functions.

`best_plan` adds draft levels in order of marginal gain, over requests and drafters, and evaluates every prefix,
because costs are step functions. `best_drafters` compares combinations of drafters.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import comb
from typing import NamedTuple

from foreword.control.rates import LEAST_SHIFT, MOST_SHIFT, Rates

MANY_REQUESTS, NEGLIGIBLE, MOST_PRICED, FEW_DRAFTERS = 12, 0.003, 128, 3
"""Limits of the computation: requests from which expected rows replace their distribution; fraction of a
plain step for levels that are only compared; priced rows; combined drafters."""

DraftSeconds = Callable[[str, float, int], float]
"""Expected time of a drafter's call by (method, levels, requests)."""


@dataclass(frozen=True)
class Pass:
    """The next pass without drafts. Its time excludes prompts."""

    drawn: float  # tokens that it commits
    rows: int
    seconds: Sequence[float]  # [rows], expected step time; the last entry applies to all larger sizes
    prompts: float = 0.0  # seconds spent on prompts

    @staticmethod
    def of(drawn: int, rows: int, seconds: Sequence[float]) -> "Pass":
        """Return a pass with one row per committed token and the other rows for prompts."""
        last = len(seconds) - 1
        return Pass(drawn, rows, seconds, seconds[min(rows, last)] - seconds[min(drawn, last)])

    def without_prompts(self) -> "Pass":
        """Return the pass without its prompt rows."""
        drawn = round(self.drawn)
        return self if self.rows == self.drawn else Pass.of(drawn, drawn, self.seconds)

    def after(self, rows: float) -> float:
        """Return the expected time of the step with this many more rows, interpolated."""
        seconds, at = self.seconds, self.rows + rows
        low = int(at)
        if low + 1 >= len(seconds):
            return seconds[-1] - self.prompts
        return seconds[low] + (at - low) * (seconds[low + 1] - seconds[low]) - self.prompts

    def row_prices(self, most: int) -> list[float]:
        """[rows], marginal seconds per added row, up to `most`; non-decreasing.

        If the first rows cost more than later ones (the pass exceeds one tile), all cost the same: the first would
        not be added alone.
        """
        corners: list[tuple[int, float]] = []  # of the lower convex hull
        for rows in range(most + 1):
            corner = (rows, self.after(rows))
            while len(corners) > 1 and _slope(*corners[-2:]) >= _slope(corners[-1], corner):
                corners.pop()
            corners.append(corner)
        return [_slope(one, other) for one, other in pairwise(corners) for _ in range(one[0], other[0])]

    @cached_property
    def plain(self) -> float:
        """Expected time of the step without drafts."""
        return self.after(0)

    @property
    def per_token(self) -> float:
        """Expected time per token without drafts."""
        return self.plain / max(self.drawn, 1)


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


@dataclass(frozen=True)
class Benefit:
    """Expected benefit of one drafter for requests of one cohort, and thresholds for cutting drafts."""

    depth: int = 0  # levels to request
    kept: int = 0  # levels with a net benefit
    gain: float = 0.0  # relative speed-up over plain decoding; 0.1: 10% faster
    saved: float = 0.0  # per step, in plain tokens
    least_shift: int = MOST_SHIFT + 1  # lowest acceptance ratio with a benefit
    draft_seconds: float = 0.0  # of the call
    # [level], minimum acceptance probability for verifying a token, and for continuing after it.
    least: tuple[float, ...] = ()
    stop: tuple[float, ...] = ()


NO_BENEFIT = Benefit(gain=-1.0)


@dataclass(frozen=True)
class Group:
    """Requests of one cohort with a drafter."""

    rates: Rates
    requests: int
    depth: int  # maximum levels
    drafter: str = ""
    shift: int = 0  # acceptance ratio
    is_stopping: bool = False  # whether the drafter ends drafts where continuing has no benefit


def added_seconds(here: Pass, requests: int, drafts: float, rows: float) -> float:
    """Return the expected time that `rows` rows add, averaged over how many requests get a draft.

    The time of the expected rows is not the expected time: if a second row is free and a third is not, a drafter with
    rare drafts would look free.
    """
    if requests > MANY_REQUESTS or not 0 < drafts < requests * 0.99:
        return here.after(rows) - here.plain
    some, each = drafts / requests, rows / drafts
    seconds = sum(
        comb(requests, count) * some**count * (1 - some) ** (requests - count) * here.after(count * each)
        for count in range(requests + 1)
    )
    return seconds - here.plain


def worked_levels(groups: Sequence[Group], depth: int) -> float:
    """Return the expected levels of a call with drafts of at most this depth: those of the deepest."""
    depth = min(depth, max(group.depth for group in groups))
    if not all(group.is_stopping for group in groups):
        return depth
    levels = 1.0
    for level in range(1, depth):
        none_drafts = 1.0
        for group in groups:
            none_drafts *= (
                1 - (group.rates.drafted[level] if level < group.depth else 0.0)
            ) ** group.requests
        levels += 1 - none_drafts
    return levels


class PlanChoice(NamedTuple):
    """Levels to verify per group for drafts of at most `depth` levels, and the result."""

    rate: float  # tokens per second
    depth: int
    levels: dict[str, float]  # by drafter, expected levels of its call
    kept: Sequence[int]
    row_seconds: float  # added per row


def best_plan(here: Pass, groups: Sequence[Group], draft_seconds: DraftSeconds) -> list[Benefit]:
    """Return the best plan for all groups together, which share the pass's rows and each drafter's call."""
    best = best_choice(here, groups, draft_seconds)
    sharing: dict[str, list[Group]] = {}
    for group in groups:
        sharing.setdefault(group.drafter, []).append(group)
    prices = {drafter: _Prices.of(here, some, best, draft_seconds) for drafter, some in sharing.items()}
    return [
        _benefit(here, group, kept, best, groups, prices[group.drafter], draft_seconds)
        for group, kept in zip(groups, best.kept, strict=True)
    ]


def best_choice(here: Pass, groups: Sequence[Group], draft_seconds: DraftSeconds) -> PlanChoice:
    """Return the levels with the most tokens per second."""
    deepest = max(group.depth for group in groups)
    # A drafter that stops itself decides by its confidence.
    are_capped = any(
        not group.is_stopping
        and draft_seconds(group.drafter, deepest, group.requests)
        - draft_seconds(group.drafter, 1, group.requests)
        >= NEGLIGIBLE * here.plain
        for group in groups
    )
    # A level never gains more than the one above it.
    levels = sorted(
        (-group.rates.gains(group.shift)[level], level, place)
        for place, group in enumerate(groups)
        for level in range(group.depth)
    )
    depths = range(1, deepest + 1) if are_capped else [deepest]
    choices = [_best_prefix(here, groups, levels, depth, draft_seconds) for depth in depths]
    return max(choices, key=lambda choice: choice.rate)


def _best_prefix(
    here: Pass,
    groups: Sequence[Group],
    levels: Sequence[tuple[float, int, int]],
    depth: int,
    draft_seconds: DraftSeconds,
) -> PlanChoice:
    """Return the best prefix of the levels up to `depth`."""
    sharing: dict[str, list[Group]] = {}
    for group in groups:
        sharing.setdefault(group.drafter, []).append(group)
    worked = {drafter: worked_levels(some, depth) for drafter, some in sharing.items()}
    requests, calls = dict.fromkeys(sharing, 0), dict.fromkeys(sharing, 0.0)
    taken: list[int] = []  # group index per level
    drafts, rows, tokens, plain = 0.0, 0.0, here.drawn, here.plain
    best_rate, best_count, row_seconds = 0.0, 0, 0.0
    for gain, level, place in levels:
        if level >= depth:
            continue
        group = groups[place]
        often = group.requests * group.rates.coverage[level]
        taken.append(place)
        if level == 0:
            drafter = group.drafter
            requests[drafter] += group.requests
            calls[drafter] = draft_seconds(drafter, worked[drafter], requests[drafter])
            drafts += often
        tokens -= gain * group.requests
        rows += often
        more = added_seconds(here, sum(requests.values()), drafts, rows)
        rate = tokens / (plain + more + sum(calls.values()))
        if rate > best_rate:
            best_rate, best_count, row_seconds = rate, len(taken), more / max(rows, 1e-9)
    kept = [taken[:best_count].count(place) for place in range(len(groups))]
    return PlanChoice(best_rate, depth, worked, kept, row_seconds)


def best_drafters(
    here: Pass,
    cohorts: Sequence[Sequence[Group]],
    in_use: frozenset[str],
    draft_seconds: DraftSeconds,
    margin: float,
) -> frozenset[str]:
    """Return the drafters with the most tokens per second, if each cohort uses one of its groups' drafters.

    A drafter with a gain alone may have none next to another: its call costs the same for fewer requests.
    """
    drafters = sorted({group.drafter for groups in cohorts for group in groups})
    if len(drafters) < 2:
        return frozenset(drafters)
    sizes = range(1, len(drafters) + 1) if len(drafters) <= FEW_DRAFTERS else (1, len(drafters))
    rates: dict[frozenset[str], float] = {}
    for some in (frozenset(each) for size in sizes for each in combinations(drafters, size)):
        present = [[group for group in groups if group.drafter in some] for groups in cohorts]
        chosen = [
            max(groups, key=lambda group: sum(group.rates.gains(0)[: group.depth]))
            for groups in present
            if groups
        ]
        rates[some] = best_choice(here, chosen, draft_seconds).rate
    best = max(rates, key=lambda some: rates[some])
    kept = in_use & frozenset(drafters)
    return kept if kept in rates and (1 + margin) * rates[kept] >= rates[best] else best


def _benefit(
    here: Pass,
    group: Group,
    kept: int,
    best: PlanChoice,
    groups: Sequence[Group],
    prices: "_Prices",
    draft_seconds: DraftSeconds,
) -> Benefit:
    together = [
        (one, levels) for one, levels in zip(groups, best.kept, strict=True) if one.drafter == group.drafter
    ]
    requests = sum(one.requests for one, levels in together if levels) or group.requests
    rates, worked, levels = group.rates, best.levels[group.drafter], max(kept, 1)
    row = best.row_seconds if kept else here.after(1) - here.plain
    call = draft_seconds(group.drafter, worked, requests)
    tokens = 1 + sum(rates.gains(group.shift)[:levels])
    takes = 1 + (sum(rates.coverage[:levels]) * row + call / requests) / here.per_token  # in plain steps
    least, stop = prices.least_chances(group)
    if not kept:
        return Benefit(gain=min(tokens / takes - 1, 0.0), draft_seconds=call, least=least, stop=stop)
    all_levels = worked_levels([one for one, _ in together], group.depth)
    requests_all = draft_seconds(group.drafter, all_levels, requests) - call < NEGLIGIBLE * here.plain
    one_more = call - draft_seconds(group.drafter, worked, requests - 1) if requests > 1 else call

    def has_benefit(shift: int) -> bool:
        values = zip(rates.gains(shift)[:kept], rates.coverage, strict=False)
        value = best = 0.0
        for gain, often in values:
            value += gain * here.per_token - often * row
            best = max(best, value)
        return best > one_more

    return Benefit(
        depth=group.depth if requests_all else best.depth,
        kept=kept,
        gain=tokens / takes - 1,
        saved=tokens - takes,
        least_shift=LEAST_SHIFT + bisect_left(range(LEAST_SHIFT, MOST_SHIFT + 1), True, key=has_benefit),
        draft_seconds=call,
        least=least,
        stop=stop,
    )


@dataclass(frozen=True)
class _Prices:
    """Marginal cost of a draft token in the best plan."""

    rows: Sequence[float]  # [level], seconds of its row
    level: float  # seconds of drafting it, per request that continues
    rate: float  # tokens per second

    @staticmethod
    def of(here: Pass, groups: Sequence[Group], best: PlanChoice, draft_seconds: DraftSeconds) -> "_Prices":
        requests, rows, before = sum(group.requests for group in groups), [], 0.0
        deepest = max(group.depth for group in groups)
        known: dict[int, list[float]] = {}  # by maximum number of added rows
        for level in range(deepest):
            deep = [group for group in groups if level < group.depth]
            # A single request has a row for every level above, and may continue to the last. Of several, some have
            # ended: rows after an expensive one do not make it cheaper if no request is left to fill them.
            often = sum([group.requests * group.rates.drafted[level] for group in deep])
            most = deepest if requests == 1 else min(round(before) + max(round(often), 1), MOST_PRICED)
            if most not in known:
                known[most] = here.row_prices(most)
            rows.append(known[most][min(round(before), most - 1)])
            before += 1 if requests == 1 else sum([g.requests * g.rates.coverage[level] for g in deep])
        # Continuing requests share the cost of a level.
        deep = [group for group in groups if group.depth > 1]
        going = max(round(sum([group.requests * group.rates.drafted[1] for group in deep])), 1)
        drafter = groups[0].drafter
        another = max(draft_seconds(drafter, 2, going) - draft_seconds(drafter, 1, going), 0.0) / going
        return _Prices(rows, another, max(best.rate, here.drawn / here.plain))

    def least_chances(self, group: Group) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return [level] the minimum probability for verifying a token, and for continuing after it."""
        if not group.depth:
            return (), ()
        least = [seconds * self.rate for seconds in self.rows[: group.depth]]
        expected = group.rates.expected
        following = zip([*least[1:], least[-1]], [*expected[1 : group.depth], expected[-1]], strict=True)
        stop = [(own + self.level * self.rate) / max(right, 0.01) for own, right in following]
        return tuple(least), tuple(stop)


def best_case(here: Pass, group: Group, draft_seconds: DraftSeconds) -> float:
    """Return the gain if there were always a draft and all of it were accepted; below 0, exploration is useless."""
    best, plain = -1.0, here.drawn / here.plain
    for levels in range(1, group.depth + 1):
        takes = here.after(group.requests * levels) + draft_seconds(group.drafter, levels, group.requests)
        best = max(best, (here.drawn + group.requests * levels) / takes / plain - 1)
    return best
