"""Creates reports of drafters in cohorts from a policy's measurements and decisions."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from foreword.control.options import Option
from foreword.control.policy import MeasuredPolicy
from foreword.control.reporting.figures import Bounds, DecisionReport, PairReport, counts_of, run_percentile
from foreword.control.reporting.totals import PairTotals
from foreword.control.value import Pass
from foreword.speculation.acceptance_stats import AcceptanceStats
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.measured.situation import Situation, cohort_name

Z_95 = 1.96
"""Standard errors on each side of a 95% confidence interval."""

DEEPEST = 8
"""Maximum depth for the break-even search."""

MOST_DECISIONS = 20
"""Number of decisions in a report: the latest."""


def describe_pairs(
    policy: MeasuredPolicy | None, totals: dict[tuple[str, str], PairTotals], situation: Situation
) -> dict[tuple[str, str], PairReport]:
    """Return reports by drafter and cohort, over all tenants. Without a measuring policy, they have only the totals."""
    cohorts, costs = situation.cohorts, situation.costs
    reports = {key: _from_totals(key, pair_totals, cohorts) for key, pair_totals in totals.items()}
    if policy is None:
        return reports
    groups: dict[tuple[str, str], list[Option]] = {}
    for estimate, option in policy.options.items():
        groups.setdefault((estimate.method, estimate.cohort), []).append(option)
    for key, options in groups.items():
        report = reports.get(key) or _from_totals(key, PairTotals(), cohorts)
        reports[key] = _with_decisions(policy, report, options, costs)
    return reports


def _from_totals(
    key: tuple[str, str], totals: PairTotals, cohorts: Mapping[str, AcceptanceStats]
) -> PairReport:
    stats = cohorts.get(cohort_name(*key), AcceptanceStats())
    accepted_lengths = counts_of(stats.drafts, stats.accepted_per_position)
    depths = counts_of(stats.drafts, stats.drafted_per_position)
    return PairReport(
        *key,
        in_use=bool(stats.drafts),
        depths=tuple(depths[depth] for depth in range(max(depths, default=-1) + 1)),
        acceptance_by_position=totals.bands,
        coverage=stats.coverage,
        asks=totals.asks,
        draft_ms=1e3 * totals.draft_seconds / totals.asks if totals.asks else 0.0,
        run_p50=run_percentile(accepted_lengths, 0.5),
        run_p90=run_percentile(accepted_lengths, 0.9),
    )


def _with_decisions(
    policy: MeasuredPolicy, report: PairReport, options: Sequence[Option], costs: StepCosts
) -> PairReport:
    """Return the report with the policy's estimates and decisions; those of the busiest tenant where one is needed."""
    busiest = max(options, key=lambda option: option.estimate.counts.requests)
    rates, benefit = busiest.estimate.rates, busiest.benefit
    levels = max(benefit.useful, busiest.estimate.counts.levels)
    method, here = report.drafter, policy.here
    return replace(
        report,
        in_use=any(option.is_on for option in options),
        reason=busiest.reason,
        predicted=predicted_gain(busiest),
        measured=measured_gain(options),
        depth=benefit.depth,
        kept=benefit.useful,
        acceptance_by_level=tuple(round(ranks[0], 4) for ranks in rates.accepted[:levels]),
        coverage=rates.coverage[0],
        break_even=None if here is None else break_even(here, rates.coverage, method, costs),
        switched=sum(option.switched for option in options),
        is_model=_costs_levels(method, costs, here),
        decisions=_decisions(options, policy.seconds),
    )


def predicted_gain(option: Option) -> Bounds | None:
    """Return the expected ratio to plain decoding with 95% bounds; None before the first decision."""
    if option.benefit.draft_seconds == 0.0 and not option.is_cost_known:
        return None
    mean, spread = 1 + option.benefit.gain, Z_95 * gain_error(option)
    return Bounds(mean - spread, mean, mean + spread)


def gain_error(option: Option) -> float:
    """Return the standard error of the expected gain, treating acceptance per level and coverage as independent."""
    estimate, levels = option.estimate, max(option.benefit.useful, 1)
    rates = estimate.rates
    weights = rates.gains(0)[:levels]
    total = sum(weights)
    if not total:
        return 0.0
    variance = _log_variance(rates.coverage[0], estimate.counts.requests)
    for level in range(levels):
        dependent = (
            sum(weights[level:]) / total
        )  # fraction of the gain that depends on this level's acceptance
        variance += dependent**2 * _log_variance(rates.accepted[level][0], estimate.counts.judged_at(level))
    slower = (1 + total) / max(
        1 + option.benefit.gain, 0.01
    )  # a longer step reduces the value of every token
    return total * math.sqrt(variance) / slower


def _log_variance(share: float, count: float) -> float:
    """Return the variance of the log of a fraction estimated from `count` observations plus a prior."""
    share = min(max(share, 0.01), 0.99)
    return (1 - share) / (share * (count + 4.0))


def measured_gain(options: Iterable[Option]) -> Bounds | None:
    """Return the measured ratio to plain decoding over all tenants, with 95% bounds; None with too few measurements."""
    weight = mean = variance = 0.0
    for option in options:
        bounds = option.guard.gain.bounds(Z_95)  # low, mean, high
        if bounds is not None:
            blocks = option.guard.gain.blocks
            weight += blocks
            mean += blocks * bounds[1]
            variance += (blocks * (bounds[2] - bounds[1])) ** 2
    if not weight:
        return None
    mean, spread = mean / weight, math.sqrt(variance) / weight
    return Bounds(mean - spread, mean, mean + spread)


def break_even(here: Pass, coverage: Sequence[float], method: str, costs: StepCosts) -> float | None:
    """Return the minimum acceptance rate, equal at all levels, with a gain for this batch. None: no rate has."""
    requests = max(round(here.drawn), 1)
    row_seconds = (here.after(requests) - here.plain) / requests
    levels = range(min(DEEPEST, len(coverage)))
    draft_seconds = [costs.draft_seconds(method, level + 1, requests) / requests for level in levels]

    def has_gain(alpha: float) -> bool:
        gained, chance = 0.0, 1.0
        for level in levels:
            chance *= alpha
            gained += coverage[level] * (chance * here.per_token - row_seconds)
            if gained > draft_seconds[level]:
                return True
        return False

    if not has_gain(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if has_gain(middle) else (middle, high)
    return high


def _costs_levels(method: str, costs: StepCosts, here: Pass | None) -> bool:
    """Whether further levels take significant time, as those of a model do; a lookup finds all levels at once."""
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
