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
    """Return the expected gain of a drafter, estimated from its shadow drafts."""
    options = options_of(drafter, cohort, policy)
    if not options:
        return Forecast()
    main = max(options, key=lambda option: option.estimate.counts.requests)  # the option of the most requests
    levels = sum(option.estimate.levels for option in options)
    if not main.is_cost_known:
        return Forecast(levels)
    return Forecast(levels, 1 + main.benefit.gain, gain_error(main))


@dataclass
class _Baseline:
    """Counters of a pair at the start of a stage."""

    since: float  # time of the start
    draft_requests: int
    faults: int
    trips: int  # times that the policy's guard switched the drafter off


@dataclass
class Baselines:
    """Counters of each pair at the start of its current stage."""

    _baselines: dict[tuple[str, str], _Baseline] = field(default_factory=dict)  # by drafter and cohort

    def health(
        self,
        pair: PairRollout,
        drafters: Sequence[Drafter],
        policy: MeasuredPolicy,
        totals: SpeculationTotals,
    ) -> DrafterHealth:
        """Return the health of the pair's drafter since its stage began; `drafters` are its instances.

        The first call in a stage records the counters with which later calls compare.
        """
        drafter, cohort = pair.rule.drafter, pair.rule.cohort
        options = options_of(drafter, cohort, policy)
        draft_requests = sum(total.asks for (name, _), total in totals.pairs.items() if name == drafter)
        faults = all_faults(drafters).total()
        trips = sum(option.guard.trips for option in options)
        start = self._baselines.get((drafter, cohort))
        if start is None or start.since != pair.since:
            start = self._baselines[drafter, cohort] = _Baseline(pair.since, draft_requests, faults, trips)
        return DrafterHealth(
            draft_requests=draft_requests - start.draft_requests,
            faults=faults - start.faults,
            memory_bytes=added_memory(drafters),
            gain=measured_gain(options),
            trips=trips - start.trips,
        )
