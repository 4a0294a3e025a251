"""Expected tokens per second of a batch, and the drafts that maximise it: pure functions.

`best_plan` adds draft levels in order of marginal gain, over requests and drafters, and evaluates every prefix, because
costs are step functions. `best_drafters` leaves out drafters without a gain next to the others.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import comb, log
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

    @cached_property
    def kind(self) -> tuple[int, int]:
        """Rounded numbers of tokens and of prompt rows."""
        drawn, steady = self.drawn, DEFAULTS.steady
        about = round(drawn) if drawn * steady < 1 else round(log(drawn) / log(1 + steady)) + 64
        return about, int(self.rows - drawn).bit_length()

    @property
    def per_token(self) -> float:
        """Expected time per token without drafts."""
        return self.plain / max(self.drawn, 1)


@dataclass(frozen=True)
class Benefit:
    """Expected benefit of one drafter for requests of one cohort, and thresholds for cutting drafts."""

    depth: int = 0  # levels to request
    useful: int = 0  # levels whose verification has an expected gain
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

    @property
    def going(self) -> list[float]:
        """[level] expected requests whose draft has the level."""
        return [self.requests * share for share in self.rates.drafted[: self.depth]]


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
    levels: Sequence[int]
    row_seconds: float  # added per row


def best_choice(here: Pass, groups: Sequence[Group], draft_seconds: DraftSeconds) -> PlanChoice:
    """Return the levels with the most tokens per second."""
    # A level never gains more than the one above it.
    ordered = sorted(
        (-gain, level, place)
        for place, group in enumerate(groups)
        for level, gain in enumerate(group.rates.gains(group.shift)[: group.depth])
    )
    deepest = max(group.depth for group in groups)
    # Of one group, every prefix has its own depth. Of several, each depth is tried if levels cost time.
    has_depths = len(groups) > 1 and any(
        draft_seconds(one.drafter, one.depth, one.requests) - draft_seconds(one.drafter, 1, one.requests)
        >= DEFAULTS.negligible_time * here.plain
        for one in groups
    )
    depths = range(1, deepest + 1) if has_depths else [deepest]
    return max(
        (_best_prefix(here, groups, ordered, depth, draft_seconds) for depth in depths),
        key=lambda one: one.rate,
    )


def _best_prefix(
    here: Pass,
    groups: Sequence[Group],
    ordered: Sequence[tuple[float, int, int]],
    depth: int,
    draft_seconds: DraftSeconds,
) -> PlanChoice:
    """Return the best prefix of the levels up to `depth`."""
    by_drafter: dict[str, list[Group]] = {}
    for group in groups:
        by_drafter.setdefault(group.drafter, []).append(group)
    requests, calls = dict.fromkeys(by_drafter, 0), dict.fromkeys(by_drafter, 0.0)
    levels, drafts, rows, tokens, deepest = [0] * len(groups), 0.0, 0.0, here.drawn, depth
    best = PlanChoice(0.0, depth, levels, 0.0)
    added = _added_seconds(here, 0, 0.0)
    is_single = len(groups) == 1
    for gain, level, place in ordered:
        if level >= depth:
            continue
        group = groups[place]
        often = group.requests * group.rates.coverage[level]
        levels = [*levels[:place], level + 1, *levels[place + 1 :]]
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
        if rate > best.rate:
            best = PlanChoice(rate, deepest, levels, more / max(rows, 1e-9))
    return best


def best_plan(here: Pass, groups: Sequence[Group], draft_seconds: DraftSeconds) -> list[Benefit]:
    """Return the best plan of one drafter for all its groups, which share the pass's rows and the call."""
    best, drafter = best_choice(here, groups, draft_seconds), groups[0].drafter

    def call(levels: float, requests: int) -> float:
        return draft_seconds(drafter, levels, requests)

    together = sum(group.requests for group, levels in zip(groups, best.levels, strict=True) if levels)
    worked, rate = worked_levels(groups, best.depth), max(best.rate, here.drawn / here.plain)
    # Requests that continue share the cost of a level.
    count = max(round(sum(sum(group.going[1:2]) for group in groups)), 1)
    level_seconds = max(call(2, count) - call(1, count), 0.0) / count
    row_prices = _row_prices(here, groups)

    def benefit(group: Group, useful: int) -> Benefit:
        rates, requests, levels = group.rates, together or group.requests, max(useful, 1)
        row = best.row_seconds if useful else here.after(1) - here.plain
        seconds = call(worked, requests)
        tokens = 1 + sum(rates.gains(group.shift)[:levels])
        takes = (
            1 + (sum(rates.coverage[:levels]) * row + seconds / requests) / here.per_token
        )  # in plain steps
        gain = tokens / takes - 1
        least = tuple([price * rate for price in row_prices[: group.depth]])
        following = zip(
            [*least[1:], *least[-1:]], [*rates.expected[1 : group.depth], rates.expected[-1]], strict=False
        )
        stop = tuple([(own + level_seconds * rate) / max(right, 0.01) for own, right in following])
        if not useful:
            return Benefit(gain=min(gain, 0.0), draft_seconds=seconds, least=least, stop=stop)
        is_free = (
            call(worked_levels(groups, group.depth), requests) - seconds
            < DEFAULTS.negligible_time * here.plain
        )
        deepest = group.depth
        if group.is_stopping:  # it rarely reaches deep levels; one more shows whether that changes
            deepest = min(deepest, 1 + sum(share >= DEFAULTS.rare_level for share in rates.drafted))
        one_more = max(seconds - call(worked, requests - 1) if requests > 1 else seconds, 0.0)

        def has_benefit(shift: int) -> bool:
            values = zip(rates.gains(shift)[:useful], rates.coverage, strict=False)
            return max(accumulate([g * here.per_token - often * row for g, often in values])) > one_more

        shifts = range(LEAST_SHIFT, MOST_SHIFT + 1)
        least_shift = LEAST_SHIFT + bisect_left(shifts, True, key=has_benefit)
        depth = deepest if is_free else best.depth
        return Benefit(depth, min(useful, deepest), gain, least_shift, seconds, least, stop)

    return [benefit(group, levels) for group, levels in zip(groups, best.levels, strict=True)]


def _row_prices(here: Pass, groups: Sequence[Group]) -> list[float]:
    """Return [level] the marginal seconds of a row.

    A single request has a row for every level above, and may continue to the last. Of several, some have ended: rows
    after an expensive one do not make it cheaper if no request is left to fill them.
    """
    deepest, is_single = max(group.depth for group in groups), sum(group.requests for group in groups) == 1
    found, before = [], 0.0
    prices: dict[int, list[float]] = {}  # by maximum number of added rows
    for level in range(deepest):
        deep = [group for group in groups if level < group.depth]
        going = max(round(sum([group.going[level] for group in deep])), 1)
        most = deepest if is_single else min(round(before) + going, 4 * DEFAULTS.priced_rows)
        if most not in prices:
            prices[most] = here.row_prices(most)
        found.append(prices[most][min(round(before), most - 1)])
        before += 1 if is_single else sum([group.requests * group.rates.coverage[level] for group in deep])
    return found


def best_drafters(
    here: Pass,
    cohorts: Sequence[Sequence[Group]],
    in_use: frozenset[str],
    draft_seconds: DraftSeconds,
    margin: float,
) -> frozenset[str]:
    """Return the drafters to use together; each cohort uses the one with the most expected tokens.

    A drafter with a gain alone may have none next to another: its call costs the same for fewer requests. The drafters
    `in_use` stay unless others are faster by `margin`.
    """

    def rate(some: frozenset[str]) -> float:
        present = [[group for group in groups if group.drafter in some] for groups in cohorts]
        chosen = [
            max(one, key=lambda group: sum(group.rates.gains(0)[: group.depth])) for one in present if one
        ]
        return best_choice(here, chosen, draft_seconds).rate

    best = frozenset(group.drafter for groups in cohorts for group in groups)
    if len(best) < 2:
        return best
    stays, fastest = in_use & best, rate(best)
    while len(best) > 1:
        fewer = max((best - {name} for name in sorted(best)), key=rate)
        if rate(fewer) < fastest:
            break
        best, fastest = fewer, rate(fewer)
    return stays if stays and (1 + margin) * rate(stays) >= fastest else best


def replaces(here: Pass, lookup: Group, other: Group, draft_seconds: DraftSeconds) -> bool:
    """Return whether a lookup alone is faster than with another drafter for the steps without a match."""
    count, levels = lookup.requests, worked_levels([other], other.depth)
    call = draft_seconds(lookup.drafter, lookup.depth, count)

    def rate(share: float) -> float:
        """Return the tokens per second if the other drafter drafts for this share of the requests."""
        tokens, rows = here.drawn, 0.0
        for group, often in ((lookup, 1.0), (other, share)):
            tokens += often * count * sum(group.rates.gains(0)[: group.depth])
            rows += often * count * sum(group.rates.coverage[: group.depth])
        other_call = draft_seconds(other.drafter, levels, max(round(share * count), 1))
        return tokens / (here.after(rows) + call + (1 - (1 - share) ** count) * other_call)

    return rate(0.0) >= rate(1 - lookup.rates.coverage[0])


def best_case(here: Pass, group: Group, draft_seconds: DraftSeconds) -> float:
    """Return the gain if there were always a draft and all of it were accepted; below 0, exploration is useless."""
    plain, requests = here.drawn / here.plain, group.requests
    rates = [
        (here.drawn + requests * levels)
        / (here.after(requests * levels) + draft_seconds(group.drafter, levels, requests))
        for levels in range(1, group.depth + 1)
    ]
    return max(rates, default=0.0) / plain - 1
