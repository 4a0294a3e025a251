"""Creates reports of pairs from a policy's measurements and decisions."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from foreword.control.options import Option
from foreword.control.policy import MeasuredPolicy
from foreword.control.reporting.figures import Bounds, DecisionReport, PairReport, counts_of, run_percentile
from foreword.control.reporting.totals import PairTotals
from foreword.control.value import Pass
from foreword.speculation.measured.acceptance_stats import AcceptanceStats
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.measured.situation import Situation, cohort_name

NINETY_FIVE = 1.96
DEEPEST = 8
"""Maximum depth for the break-even search."""

MOST_DECISIONS = 20


def describe_pairs(
    policy: MeasuredPolicy | None, totals: dict[tuple[str, str], PairTotals], situation: Situation
) -> dict[tuple[str, str], PairReport]:
    """Return reports by drafter and cohort, over all tenants; `policy` is None if it measures nothing."""
    cohorts, costs = situation.cohorts, situation.costs
    found = {key: _from_totals(key, one, cohorts) for key, one in totals.items()}
    if policy is None:
        return found
    groups: dict[tuple[str, str], list[Option]] = {}
    for estimate, option in policy.options.items():
        groups.setdefault((estimate.method, estimate.cohort), []).append(option)
    for key, options in groups.items():
        reported = found.get(key) or _from_totals(key, PairTotals(), cohorts)
        found[key] = _described(policy, reported, options, costs)
    return found


def _from_totals(
    key: tuple[str, str], totals: PairTotals, cohorts: Mapping[str, AcceptanceStats]
) -> PairReport:
    stats = cohorts.get(cohort_name(*key), AcceptanceStats())
    runs = counts_of(stats.drafts, stats.accepted_per_position)
    depths = counts_of(stats.drafts, stats.drafted_per_position)
    return PairReport(
        *key,
        in_use=bool(stats.drafts),
        depths=tuple(depths[depth] for depth in range(max(depths, default=-1) + 1)),
        acceptance_by_position=totals.bands,
        coverage=stats.coverage,
        asks=totals.asks,
        draft_ms=1e3 * totals.draft_seconds / totals.asks if totals.asks else 0.0,
        run_p50=run_percentile(runs, 0.5),
        run_p90=run_percentile(runs, 0.9),
    )


def _described(
    policy: MeasuredPolicy, reported: PairReport, options: Sequence[Option], costs: StepCosts
) -> PairReport:
    lead = max(options, key=lambda option: option.estimate.counts.requests)
    rates, benefit = lead.estimate.rates, lead.benefit
    levels = max(benefit.kept, lead.estimate.counts.levels)
    method, here = reported.drafter, policy.here
    return replace(
        reported,
        in_use=any(option.is_on for option in options),
        reason=lead.reason,
        predicted=predicted_gain(lead),
        measured=measured_gain(options),
        depth=benefit.depth,
        kept=benefit.kept,
        acceptance_by_level=tuple(round(ranks[0], 4) for ranks in rates.accepted[:levels]),
        coverage=rates.coverage[0],
        break_even=None if here is None else break_even(here, rates.coverage, method, costs),
        switched=sum(option.switched for option in options),
        is_model=_costs_levels(method, costs, here),
        decisions=_decisions(options, policy.seconds),
    )


def predicted_gain(option: Option) -> Bounds | None:
    """Return the expected gain with its uncertainty; None before the first decision."""
    if option.benefit.draft_seconds == 0.0 and not option.is_cost_known:
        return None
    mean, spread = 1 + option.benefit.gain, NINETY_FIVE * gain_error(option)
    return Bounds(mean - spread, mean, mean + spread)


def gain_error(option: Option) -> float:
    """Return the standard error of the expected gain, treating acceptance by level and coverage as independent."""
    estimate, levels = option.estimate, max(option.benefit.kept, 1)
    rates = estimate.rates
    weights = rates.gains(0)[:levels]
    total = sum(weights)
    if not total:
        return 0.0
    variance = _of_share(rates.coverage[0], estimate.counts.requests)
    for level in range(levels):
        below = sum(weights[level:]) / total  # part of the gain that depends on this level
        variance += below**2 * _of_share(rates.accepted[level][0], estimate.counts.judged_at(level))
    slower = (1 + total) / max(
        1 + option.benefit.gain, 0.01
    )  # a longer step reduces the value of every token
    return total * math.sqrt(variance) / slower


def _of_share(share: float, count: float) -> float:
    """Return the variance of the log of a fraction estimated from `count` observations plus a prior."""
    share = min(max(share, 0.01), 0.99)
    return (1 - share) / (share * (count + 4.0))


def measured_gain(options: Iterable[Option]) -> Bounds | None:
    """Return the measured gain over all tenants; None with too few measurements."""
    weight = mean = variance = 0.0
    for option in options:
        found = option.guard.gain.bounds(NINETY_FIVE)
        if found is not None:
            blocks = option.guard.gain.blocks
            weight += blocks
            mean += blocks * found[1]
            variance += (blocks * (found[2] - found[1])) ** 2
    if not weight:
        return None
    mean, spread = mean / weight, math.sqrt(variance) / weight
    return Bounds(mean - spread, mean, mean + spread)


def break_even(here: Pass, coverage: Sequence[float], method: str, costs: StepCosts) -> float | None:
    """Return the minimum acceptance, equal at all levels, with a gain for this batch; None: no acceptance has one."""
    asks = max(round(here.drawn), 1)
    row = (here.after(asks) - here.plain) / asks
    levels = range(min(DEEPEST, len(coverage)))
    ask_seconds = [costs.draft_seconds(method, level + 1, asks) / asks for level in levels]

    def pays(alpha: float) -> bool:
        gained, chance = 0.0, 1.0
        for level in levels:
            chance *= alpha
            gained += coverage[level] * (chance * here.per_token - row)
            if gained > ask_seconds[level]:
                return True
        return False

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _costs_levels(method: str, costs: StepCosts, here: Pass | None) -> bool:
    if here is None:
        return False
    return costs.draft_seconds(method, 4) - costs.draft_seconds(method, 1) > 0.03 * here.plain


def _decisions(options: Iterable[Option], now: float) -> tuple[DecisionReport, ...]:
    reported = [
        DecisionReport(now - one.seconds, "on" if one.is_on else "off", one.reason, 1 + one.gain)
        for option in options
        for one in option.switches
    ]
    return tuple(sorted(reported, key=lambda one: one.ago_seconds)[:MOST_DECISIONS])
