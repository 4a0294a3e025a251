"""Speculation control besides the steps: statistics, roll-outs, checks and reports."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic

from foreword.acceptance.rules.rule import Rule
from foreword.control.policy import MeasuredPolicy
from foreword.control.policy_file.document import Prices
from foreword.control.reporting.describe import describe_pairs
from foreword.control.reporting.figures import ControlReport, DecisionReport, PairReport, Usage
from foreword.control.reporting.totals import SpeculationTotals
from foreword.control.rollout.evidence import Outcome
from foreword.control.rollout.pair import PairRollout
from foreword.engine.drafting.drafter_pool import DrafterPool
from foreword.engine.messages import NewRequest
from foreword.engine.policy.file import WATCH_SECONDS
from foreword.engine.policy.health import is_of
from foreword.engine.policy.steering import Pressure, Steering
from foreword.engine.policy.verification import CheckTotals, IdleChecks
from foreword.engine.requests.assignment import Assignment
from foreword.engine.requests.request import Request
from foreword.errors import RequestError
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.measured.situation import Situation
from foreword.speculation.protocols import Policy
from foreword.speculation.report import StageSeconds, StepReport

MOST_PAIRS = 64
"""Maximum number of reported pairs, those with the most calls."""


@dataclass(frozen=True)
class EngineLoad:
    """Engine figures for a report."""

    wall_seconds: float
    seconds: StageSeconds
    kv_pages: int
    kv_pages_used: int
    faults: Mapping[str, int]  # by drafter and kind


def control_report(
    policy: MeasuredPolicy | None,
    situation: Situation,
    totals: SpeculationTotals,
    steering: Steering | None,
    load: EngineLoad,
) -> ControlReport:
    """Return the state of speculation."""
    here = None if policy is None else policy.here
    plain, speculative = totals.preemption_rates()
    seconds = load.seconds
    host = seconds.total - seconds.draft - seconds.verify
    return ControlReport(
        enabled=situation.speculating,
        policy_file=None if steering is None else str(steering.path),
        pairs=_pairs(policy, situation, totals, steering, load),
        batch=0.0 if here is None else here.drawn,
        step_ms=0.0 if here is None else 1e3 * here.plain,
        row_ms=0.0 if here is None else 1e3 * (here.after(1) - here.plain),
        probe_share=0.0 if policy is None else policy.explorer.share,
        probe_seconds=0.0 if policy is None else policy.explorer.spent,
        reference_passes=0 if policy is None else policy.reference.passes,
        host_share=host / seconds.total if seconds.total else 0.0,
        provisional_pages=totals.provisional_pages,
        provisional_peak=totals.provisional_peak,
        kv_pages=load.kv_pages,
        kv_usage=load.kv_pages_used / load.kv_pages if load.kv_pages else 0.0,
        preemptions_plain=plain,
        preemptions_guessing=speculative,
        mismatches=0 if steering is None else sum(p.mismatches for p in steering.rollouts.pairs.values()),
        usage=_usage(totals, steering, load),
    )


def _usage(totals: SpeculationTotals, steering: Steering | None, load: EngineLoad) -> Usage:
    prices = None if steering is None else steering.document.prices
    return Usage(
        wall_seconds=load.wall_seconds,
        draft_seconds=load.seconds.draft,
        target_seconds=load.seconds.verify + load.seconds.accept,
        tokens=totals.tokens,
        draft_price=None if prices is None else prices.draft,
        target_price=None if prices is None else prices.target,
    )


def _pairs(
    policy: MeasuredPolicy | None,
    situation: Situation,
    totals: SpeculationTotals,
    steering: Steering | None,
    load: EngineLoad,
) -> tuple[PairReport, ...]:
    found = describe_pairs(policy, totals.pairs, situation)
    if steering is not None:
        found = _with_rollouts(found, steering)
    reported = [_with_faults(pair, steering, load) for pair in found.values()]
    reported.sort(key=lambda pair: (-pair.asks, pair.drafter, pair.cohort))
    return tuple(reported[:MOST_PAIRS])


def _with_rollouts(
    found: dict[tuple[str, str], PairReport], steering: Steering
) -> dict[tuple[str, str], PairReport]:
    """Add roll-out pairs to the reports, also those without calls."""
    reported = dict(found)
    now = steering.rollouts.clock()
    for (drafter, cohort), pair in list(steering.rollouts.pairs.items()):
        parts = [key for key in found if key[0] == drafter and is_of(key[1], cohort)] or [(drafter, cohort)]
        for key in parts:
            reported[key] = _with_rollout(found.get(key, PairReport(*key)), pair, now)
    return reported


def _with_rollout(report: PairReport, pair: PairRollout, now: float) -> PairReport:
    moves = [DecisionReport(now - move.at, move.stage.value, move.reason) for move in pair.moves]
    own = report.decisions if pair.percent else ()  # an unused drafter is not switched
    return replace(
        report,
        state=pair.stage.value,
        in_use=report.in_use and pair.percent > 0,
        reason=pair.reason,
        percent=pair.percent,
        since_seconds=now - pair.since,
        decisions=tuple(sorted([*own, *moves], key=lambda one: one.ago_seconds)[:20]),
    )


def _with_faults(pair: PairReport, steering: Steering | None, load: EngineLoad) -> PairReport:
    faults = None if steering is None else steering.faults(pair.drafter)
    if faults is None:
        parts = pair.drafter.split("+")
        faults = sum(count for kind, count in load.faults.items() if kind.partition("/")[0] in parts)
    return replace(pair, faults=faults)


_log = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
"""Seconds until the report of a busy engine is recomputed; it is read more often than it changes."""


class SpeculationService:
    """Observes every step and every ended request, in the engine's thread."""

    def __init__(
        self, cache: PagedCache, policy: Policy, steering: Steering | None, drafters: DrafterPool, rule: Rule
    ) -> None:
        self._cache = cache
        self._policy: MeasuredPolicy | None = getattr(policy, "measured", None)
        self._steering = steering
        self._drafters = drafters
        self.totals = SpeculationTotals(cache.page_size)
        self._began = monotonic()
        self._steps = 0
        self._report: ControlReport | None = None
        self._reported_at, self._reported_steps = 0.0, 0
        self._checks: IdleChecks | None = None
        self._check_pages = 0
        self._check_seconds = 0.0
        self._is_checking = False
        if steering is not None:
            steering.attach(drafters)
            self._checks = IdleChecks(steering, rule is Rule.COUPLED, not steering.is_shape_invariant)

    @property
    def idle_seconds(self) -> float | None:
        """Maximum seconds between calls of `between_steps`, so that the policy file is checked; None without
        a file."""
        return None if self._steering is None else WATCH_SECONDS

    def between_steps(self, waiting: int) -> None:
        if self._steering is not None:
            used = 1 - self._cache.available_pages / self._cache.pool.num_pages
            self._steering.between_steps(Pressure(waiting, used), self.totals)

    def observe(self, report: StepReport, preemptions: int) -> None:
        """Add a step to the statistics."""
        self._steps += 1
        self._check_seconds += report.seconds.total
        if not self._is_checking:  # a check runs alone and serves no user
            self.totals.observe(report, preemptions)

    def ended(self, request: Request) -> None:
        """Pass an ended request to checks and roll-outs."""
        if self._checks is None or self._steering is None:
            return
        if request.identity.assigned.is_check:
            self._is_checking = False
            pages = self._cache.available_pages
            self._checks.finished(request, CheckTotals(self._check_pages, pages, self._check_seconds))
            return
        self._checks.ended(request)
        if places := request.identity.assigned.places:
            outcome = outcome_of(request, self._steering.document.prices)
            for place in places:
                self._steering.ended(place, outcome)

    def next_check(self) -> tuple[NewRequest, Assignment] | None:
        """Return a request to decode again while the engine is idle."""
        found = None if self._checks is None else self._checks.next()
        if found is not None:
            self._check_pages, self._check_seconds = self._cache.available_pages, 0.0
            self._is_checking = True
        return found

    def interrupted(self) -> None:
        """Record that a request has interrupted the check, which is repeated later."""
        self._is_checking = False

    def report(self, situation: Situation, seconds: StageSeconds, is_busy: bool) -> ControlReport:
        """Return the state of speculation, at most `REPORT_SECONDS` old."""
        now = monotonic()
        if self._is_stale(now, is_busy):
            pages = self._cache.pool.num_pages
            used = pages - self._cache.available_pages
            load = EngineLoad(now - self._began, seconds, pages, used, self._drafters.fault_counts())
            self._report = control_report(self._policy, situation, self.totals, self._steering, load)
            self._reported_at, self._reported_steps = now, self._steps
        assert self._report is not None
        return self._report

    def _is_stale(self, now: float, is_busy: bool) -> bool:
        if self._report is None or (not is_busy and self._steps != self._reported_steps):
            return True
        return now - self._reported_at >= REPORT_SECONDS

    def move(self, drafter: str, cohort: str, state: str) -> None:
        """Move a pair to another stage, on the operator's request."""
        try:
            if self._steering is None:
                raise RequestError("there is no policy file")
            self._steering.set_stage(drafter, cohort, state)
        except RequestError as error:
            _log.warning("%s for %s stays as it is: %s", drafter, cohort, error)
        self._report = None

    def close(self) -> None:
        if self._steering is not None:
            self._steering.close()


def outcome_of(request: Request, prices: Prices | None) -> Outcome:
    """Return a request's outcome for its arm of a roll-out."""
    accounting = request.accounting
    tokens = len(request.output_ids)
    later = tokens - accounting.first_tokens
    target, draft = accounting.seconds.total - accounting.seconds.draft, accounting.seconds.draft
    weights = prices or Prices(1.0, 1.0)
    return Outcome(
        passes=accounting.passes,
        tokens=tokens,
        ttft=accounting.queue_seconds + accounting.prefill_seconds,
        tpot=accounting.decode_seconds / later if later > 0 else None,
        cost=target * weights.target + draft * weights.draft,
        preemptions=accounting.preemptions,
        is_error=request.finish_reason == "error",
    )
