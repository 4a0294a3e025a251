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
    # A policy has one option per drafter, cohort and tenant.
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
    """Return the report of a drafter in a cohort (`key`) without estimates and decisions."""
    stats = cohorts.get(cohort_name(*key), AcceptanceStats())
    accepted_lengths = counts_of(stats.drafts, stats.accepted_per_position)
    depths = counts_of(stats.drafts, stats.drafted_per_position)  # number of drafts by depth
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
    """Return the report with the policy's estimates and decisions. `options` has one option per tenant.

    Figures that cannot be combined over tenants are those of the busiest one.
    """
    busiest = max(options, key=lambda option: option.estimate.counts.requests)
    rates, benefit = busiest.estimate.rates, busiest.benefit
    levels = max(benefit.useful, busiest.estimate.counts.levels)
    method, current_pass = report.drafter, policy.here
    least_rate, is_model = None, False
    if current_pass is not None:
        least_rate = break_even(current_pass, rates.coverage, method, costs)
        is_model = _has_slow_levels(method, costs, current_pass)
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
        break_even=least_rate,
        switched=sum(option.switched for option in options),
        is_model=is_model,
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
    gained_tokens = rates.gains(0)[:levels]  # expected accepted draft tokens per pass, by level
    total = sum(gained_tokens)
    if not total:
        return 0.0
    # Relative variances of independent factors add up.
    variance = _log_variance(rates.coverage[0], estimate.counts.requests)
    for level in range(levels):
        # The tokens of this level and of all deeper ones depend on its acceptance.
        dependent = sum(gained_tokens[level:]) / total
        variance += dependent**2 * _log_variance(rates.accepted[level][0], estimate.counts.judged_at(level))
    # (1 + total) tokens in a step that is `slowdown` times as long result in the expected gain.
    slowdown = (1 + total) / max(1 + option.benefit.gain, 0.01)
    return total * math.sqrt(variance) / slowdown


def _log_variance(share: float, count: float) -> float:
    """Return the variance of the log of a fraction estimated from `count` observations plus a prior."""
    share = min(max(share, 0.01), 0.99)
    return (1 - share) / (share * (count + 4.0))  # 4.0: observations for which the prior counts


def measured_gain(options: Iterable[Option]) -> Bounds | None:
    """Return the measured ratio to plain decoding over all tenants, with 95% bounds; None with too few measurements."""
    weight = mean = variance = 0.0
    for option in options:
        bounds = option.guard.gain.bounds(Z_95)
        if bounds is not None:
            _, option_mean, high = bounds
            blocks = option.guard.gain.blocks  # measured blocks of steps
            weight += blocks
            mean += blocks * option_mean
            variance += (blocks * (high - option_mean)) ** 2
    if not weight:
        return None
    mean, spread = mean / weight, math.sqrt(variance) / weight
    return Bounds(mean - spread, mean, mean + spread)


def break_even(current_pass: Pass, coverage: Sequence[float], method: str, costs: StepCosts) -> float | None:
    """Return the minimum acceptance rate, equal at all levels, with a gain for this batch; None: no rate has a gain.

    `coverage` is, by level, the fraction of draft requests that get a token of that level.
    """
    requests = max(round(current_pass.drawn), 1)
    row_seconds = (current_pass.after(requests) - current_pass.plain) / requests  # of one more token
    levels = range(min(DEEPEST, len(coverage)))
    draft_seconds = [costs.draft_seconds(method, level + 1, requests) / requests for level in levels]

    def has_gain(alpha: float) -> bool:
        gained_seconds, chance = 0.0, 1.0
        for level in levels:
            chance *= alpha
            gained_seconds += coverage[level] * (chance * current_pass.per_token - row_seconds)
            if gained_seconds > draft_seconds[level]:
                return True
        return False

    if not has_gain(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(10):  # bisection to a precision of 0.001
        middle = (low + high) / 2
        low, high = (low, middle) if has_gain(middle) else (middle, high)
    return high


def _has_slow_levels(method: str, costs: StepCosts, current_pass: Pass) -> bool:
    """Whether three more levels take over 3% of a plain pass, as with a model; a lookup finds all levels at once."""
    return costs.draft_seconds(method, 4) - costs.draft_seconds(method, 1) > 0.03 * current_pass.plain


def _decisions(options: Iterable[Option], now: float) -> tuple[DecisionReport, ...]:
    """Return the latest decisions of all options, newest first."""
    reported = [
        DecisionReport(now - switch.seconds, "on" if switch.is_on else "off", switch.reason, 1 + switch.gain)
        for option in options
        for switch in option.switches
    ]
    return tuple(sorted(reported, key=lambda decision: decision.ago_seconds)[:MOST_DECISIONS])
