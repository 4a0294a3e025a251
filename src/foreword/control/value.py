"""Expected tokens per second of a batch, and the drafts that maximise it: pure functions.

`best_plan` adds draft levels in order of marginal gain, over requests and drafters, and evaluates every prefix,
because costs are step functions. `best_drafters` compares combinations of drafters.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from math import comb
from typing import NamedTuple

from foreword.control.rates import LEAST_SHIFT, MOST_SHIFT, Rates
from foreword.control.settings import DEFAULTS

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
        """Return the marginal seconds of each added row, [rows], up to `most`; non-decreasing.

        If the first rows cost more than later ones (the pass exceeds one tile), all cost the same: the first would
        not be added alone. Of many rows, a sample is read.
        """

        def slope(one: tuple[int, float], other: tuple[int, float]) -> float:
            return (other[1] - one[1]) / (other[0] - one[0])

        corners: list[tuple[int, float]] = []  # of the lower convex hull
        for rows in [*range(0, most, most // DEFAULTS.priced_rows + 1), most]:
            corner = (rows, self.after(rows))
            while len(corners) > 1 and slope(*corners[-2:]) >= slope(corners[-1], corner):
                corners.pop()
            corners.append(corner)
        return [slope(one, other) for one, other in pairwise(corners) for _ in range(one[0], other[0])]

    @cached_property
    def plain(self) -> float:
        """Expected time of the step without drafts."""
        return self.after(0)

    @property
    def per_token(self) -> float:
        """Expected time per token without drafts."""
        return self.plain / max(self.drawn, 1)


@dataclass(frozen=True)
class Benefit:
    """Expected benefit of one drafter for requests of one cohort, and thresholds for cutting drafts."""

    depth: int = 0  # levels to request
    kept: int = 0  # levels with a net benefit
    gain: float = 0.0  # relative speed-up over plain decoding; 0.1: 10% faster
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


def _added_seconds(here: Pass, requests: int, drafts: float) -> Callable[[float], float]:
    """Return the expected time that added rows take, as a function of their expected number.

    It is averaged over how many requests get a draft: if a second row is free and a third is not, a drafter with rare
    drafts would look free by its expected rows.
    """
    plain, after = here.plain, here.after
    if requests > DEFAULTS.many_requests or not 0 < drafts < requests * 0.99:
        return lambda rows: after(rows) - plain
    often = drafts / requests
    shares = [
        (comb(requests, count) * often**count * (1 - often) ** (requests - count), count / drafts)
        for count in range(requests + 1)
    ]
    return lambda rows: sum([share * after(each * rows) for share, each in shares]) - plain


def worked_levels(groups: Sequence[Group], depth: int) -> float:
    """Return the expected levels of a call with drafts of at most this depth: those of the deepest."""
    depth = min(depth, max(group.depth for group in groups))
    if not all(group.is_stopping for group in groups):
        return depth
    levels = 1.0
    for level in range(1, depth):
        none_drafts = 1.0
        for group in groups:
            if level < group.depth:
                none_drafts *= (1 - group.rates.drafted[level]) ** group.requests
        levels += 1 - none_drafts
    return levels


class PlanChoice(NamedTuple):
    """Levels to verify per group for drafts of at most `depth` levels, and the result."""

    rate: float  # tokens per second
    depth: int
    kept: Sequence[int]
    row_seconds: float  # added per row


def best_plan(here: Pass, groups: Sequence[Group], draft_seconds: DraftSeconds) -> list[Benefit]:
    """Return the best plan of one drafter for all its groups, which share the pass's rows and the call."""
    best = best_choice(here, groups, draft_seconds)
    requests = sum(group.requests for group, kept in zip(groups, best.kept, strict=True) if kept)
    call = _Call(here, best, groups, requests, draft_seconds)
    return [call.benefit(group, kept) for group, kept in zip(groups, best.kept, strict=True)]


def best_choice(here: Pass, groups: Sequence[Group], draft_seconds: DraftSeconds) -> PlanChoice:
    """Return the levels with the most tokens per second."""
    deepest = max(group.depth for group in groups)
    # A level never gains more than the one above it.
    levels = sorted(
        (-gain, level, place)
        for place, group in enumerate(groups)
        for level, gain in enumerate(group.rates.gains(group.shift)[: group.depth])
    )
    # Of one group, every prefix has its own depth.
    are_limited = len(groups) > 1 and any(
        draft_seconds(one.drafter, one.depth, one.requests) - draft_seconds(one.drafter, 1, one.requests)
        >= DEFAULTS.negligible_time * here.plain
        for one in groups
    )
    choices = (
        _best_prefix(here, groups, levels, depth, draft_seconds)
        for depth in (range(1, deepest + 1) if are_limited else [deepest])
    )
    return max(choices, key=lambda choice: choice.rate)


def _best_prefix(
    here: Pass,
    groups: Sequence[Group],
    levels: Iterable[tuple[float, int, int]],
    depth: int,
    draft_seconds: DraftSeconds,
) -> PlanChoice:
    """Return the best prefix of the levels up to `depth`."""
    by_drafter: dict[str, list[Group]] = {}
    for group in groups:
        by_drafter.setdefault(group.drafter, []).append(group)
    requests, calls = dict.fromkeys(by_drafter, 0), dict.fromkeys(by_drafter, 0.0)
    taken: list[int] = []  # group index per level
    drafts, rows, tokens, deepest = 0.0, 0.0, here.drawn, depth
    best_rate, best_count, best_depth, row_seconds = 0.0, 0, depth, 0.0
    added = _added_seconds(here, 0, 0.0)
    is_single = len(groups) == 1  # then every prefix has its own depth
    for gain, level, place in levels:
        if level >= depth:
            continue
        group = groups[place]
        often = group.requests * group.rates.coverage[level]
        taken.append(place)
        if level == 0:
            requests[group.drafter] += group.requests
            drafts += often
            added = _added_seconds(here, sum(requests.values()), drafts)
        if level == 0 or is_single:
            deepest = level + 1 if is_single else depth
            worked = worked_levels(by_drafter[group.drafter], deepest)
            calls[group.drafter] = draft_seconds(group.drafter, worked, requests[group.drafter])
        tokens -= gain * group.requests
        rows += often
        more = added(rows)
        rate = tokens / (here.plain + more + sum(calls.values()))
        if rate > best_rate:
            best_rate, best_count, best_depth, row_seconds = rate, len(taken), deepest, more / max(rows, 1e-9)
    return PlanChoice(
        best_rate, best_depth, [taken[:best_count].count(p) for p in range(len(groups))], row_seconds
    )


class _Call:
    """One drafter's call in the best plan, and the marginal costs of its draft tokens."""

    def __init__(
        self,
        here: Pass,
        best: PlanChoice,
        groups: Sequence[Group],
        requests: int,
        draft_seconds: DraftSeconds,
    ) -> None:
        self._here, self._best, self._groups, self._requests = here, best, groups, requests
        self._seconds, self._drafter = draft_seconds, groups[0].drafter
        self._worked = worked_levels(groups, best.depth)
        self._rate = max(best.rate, here.drawn / here.plain)
        # Requests that continue share the cost of a level.
        going = [group.requests * group.rates.drafted[1] for group in groups if group.depth > 1]
        count = max(round(sum(going)), 1)
        self._level_seconds = max(self._call(2, count) - self._call(1, count), 0.0) / count

    def _call(self, levels: float, requests: int) -> float:
        return self._seconds(self._drafter, levels, requests)

    def benefit(self, group: Group, kept: int) -> Benefit:
        """Return the benefit of one of its groups, of which `kept` levels are verified."""
        here, rates, levels = self._here, group.rates, max(kept, 1)
        requests = self._requests or group.requests
        row = self._best.row_seconds if kept else here.after(1) - here.plain
        call = self._call(self._worked, requests)
        tokens = 1 + sum(rates.gains(group.shift)[:levels])
        takes = 1 + (sum(rates.coverage[:levels]) * row + call / requests) / here.per_token  # in plain steps
        gain, (least, stop) = tokens / takes - 1, self._thresholds(group)
        if not kept:
            return Benefit(gain=min(gain, 0.0), draft_seconds=call, least=least, stop=stop)
        all_levels = self._call(worked_levels(self._groups, group.depth), requests)
        is_deep = all_levels - call < DEFAULTS.negligible_time * here.plain
        # A drafter that stops itself rarely reaches deep levels; one more shows whether that changes.
        reached = 1 + sum(share >= DEFAULTS.rare_level for share in rates.drafted)
        deepest = min(group.depth, reached if group.is_stopping else group.depth)
        one_more = call - self._call(self._worked, requests - 1) if requests > 1 else call

        def has_benefit(shift: int) -> bool:
            values = zip(rates.gains(shift)[:kept], rates.coverage, strict=False)
            return max(accumulate([g * here.per_token - often * row for g, often in values])) > max(
                one_more, 0.0
            )

        return Benefit(
            depth=deepest if is_deep else self._best.depth,
            kept=min(kept, deepest),
            gain=gain,
            least_shift=LEAST_SHIFT + bisect_left(range(LEAST_SHIFT, MOST_SHIFT + 1), True, key=has_benefit),
            draft_seconds=call,
            least=least,
            stop=stop,
        )

    @cached_property
    def _row_seconds(self) -> list[float]:
        """Marginal seconds of a row at each draft level."""
        requests, rows, before = sum(group.requests for group in self._groups), [], 0.0
        deepest = max(group.depth for group in self._groups)
        prices: dict[int, list[float]] = {}  # by maximum number of added rows
        for level in range(deepest):
            deep = [group for group in self._groups if level < group.depth]
            # A single request has a row for every level above, and may continue to the last. Of several, some have
            # ended: rows after an expensive one do not make it cheaper if no request is left to fill them.
            often = sum([group.requests * group.rates.drafted[level] for group in deep])
            most = (
                deepest
                if requests == 1
                else min(round(before) + max(round(often), 1), 4 * DEFAULTS.priced_rows)
            )
            if most not in prices:
                prices[most] = self._here.row_prices(most)
            rows.append(prices[most][min(round(before), most - 1)])
            before += 1 if requests == 1 else sum([g.requests * g.rates.coverage[level] for g in deep])
        return rows

    def _thresholds(self, group: Group) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return [level] the minimum probability for verifying a token, and for continuing after it."""
        if not group.depth:
            return (), ()
        least = [seconds * self._rate for seconds in self._row_seconds[: group.depth]]
        expected = group.rates.expected
        following = zip([*least[1:], least[-1]], [*expected[1 : group.depth], expected[-1]], strict=True)
        stop = [(own + self._level_seconds * self._rate) / max(right, 0.01) for own, right in following]
        return tuple(least), tuple(stop)


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
    sizes = range(1, len(drafters) + 1) if len(drafters) <= DEFAULTS.few_drafters else (1, len(drafters))
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


def best_case(here: Pass, group: Group, draft_seconds: DraftSeconds) -> float:
    """Return the gain if there were always a draft and all of it were accepted; below 0, exploration is useless."""
    plain, requests = here.drawn / here.plain, group.requests
    rates = [
        (here.drawn + requests * levels)
        / (here.after(requests * levels) + draft_seconds(group.drafter, levels, requests))
        for levels in range(1, group.depth + 1)
    ]
    return max(rates, default=0.0) / plain - 1
