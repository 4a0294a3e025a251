"""Health and forecast of a drafter during a roll-out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.control.options import Option
from foreword.control.policy import MeasuredPolicy
from foreword.control.reporting.describe import gain_error, measured_gain
from foreword.control.reporting.totals import SpeculationTotals
from foreword.control.rollout.guards import DrafterHealth
from foreword.control.rollout.pair import Forecast, PairRollout
from foreword.speculation.drafting import Drafter, added_memory, all_faults


def is_of(label: str, cohort: str) -> bool:
    """Return whether a statistics label, such as `chat/greedy`, belongs to a cohort of the policy file."""
    return label.partition("/")[0] == cohort


def options_of(drafter: str, cohort: str, policy: MeasuredPolicy) -> list[Option]:
    """Return the policy's options for a drafter in a cohort, over all tenants."""
    return [
        option
        for estimate, option in policy.options.items()
        if estimate.method == drafter and is_of(estimate.cohort, cohort)
    ]


def forecast(drafter: str, cohort: str, policy: MeasuredPolicy) -> Forecast:
    """Return the gain that the drafter's shadow drafts let expect."""
    options = options_of(drafter, cohort, policy)
    if not options:
        return Forecast()
    lead = max(options, key=lambda option: option.estimate.counts.requests)
    levels = sum(option.estimate.levels for option in options)
    if not lead.is_cost_known:
        return Forecast(levels)
    return Forecast(levels, 1 + lead.benefit.gain, gain_error(lead))


@dataclass
class _Baseline:
    since: float
    asks: int
    faults: int
    trips: int


@dataclass
class Baselines:
    """Counters of each pair at the start of its current stage."""

    _before: dict[tuple[str, str], _Baseline] = field(default_factory=dict)

    def health(
        self,
        pair: PairRollout,
        parts: Sequence[Drafter],
        policy: MeasuredPolicy,
        totals: SpeculationTotals,
    ) -> DrafterHealth:
        """Return the health of the pair's drafter since its stage began; `parts` are its instances."""
        drafter, cohort = pair.rule.drafter, pair.rule.cohort
        options = options_of(drafter, cohort, policy)
        asks = sum(one.asks for (name, _), one in totals.pairs.items() if name == drafter)
        faults = all_faults(parts).total()
        trips = sum(option.guard.trips for option in options)
        before = self._before.get((drafter, cohort))
        if before is None or before.since != pair.since:
            before = self._before[drafter, cohort] = _Baseline(pair.since, asks, faults, trips)
        return DrafterHealth(
            asks=asks - before.asks,
            faults=faults - before.faults,
            memory_bytes=added_memory(parts),
            gain=measured_gain(options),
            trips=trips - before.trips,
        )
