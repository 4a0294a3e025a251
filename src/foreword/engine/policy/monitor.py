"""Speculation control outside of steps: statistics, roll-outs, checks and reports."""

import logging
from dataclasses import replace
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
from foreword.engine.policy.controller import PolicyFileController
from foreword.engine.policy.file import WATCH_SECONDS
from foreword.engine.policy.health import is_of
from foreword.engine.policy.verification import IdleChecks, ReplayTotals
from foreword.engine.requests.request import Assignment, Request
from foreword.errors import RequestError
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.measured.situation import Situation
from foreword.speculation.protocols import Policy
from foreword.speculation.report import StageSeconds, StepReport

_log = logging.getLogger(__name__)

MOST_PAIRS = 64  # maximum number of reported pairs of drafter and cohort, those with the most draft requests
MOST_DECISIONS = 20  # maximum number of reported decisions per pair, the newest ones

REPORT_SECONDS = 1.0
"""Seconds until the report of a busy engine is recomputed; it is read more often than it changes."""


class SpeculationMonitor:
    """Statistics, roll-outs and reports of speculation; used in the engine's thread."""

    def __init__(
        self,
        cache: PagedCache,
        policy: Policy,
        policy_file: PolicyFileController | None,
        drafters: DrafterPool,
        rule: Rule,
    ) -> None:
        self._cache = cache
        self._policy: MeasuredPolicy | None = getattr(policy, "measured", None)
        self._policy_file = policy_file
        self._drafters = drafters
        self.totals = SpeculationTotals(cache.page_size)
        self._began = monotonic()
        self._steps = 0
        self._report: ControlReport | None = None  # newest report
        self._reported_at, self._reported_steps = 0.0, 0  # time and number of steps of the newest report
        self._checks: IdleChecks | None = None
        self._replay_pages = 0  # free pages when the replay began
        self._replay_seconds = 0.0  # time of steps since the replay began
        self._is_replaying = False  # whether an ended request is decoded again
        if policy_file is not None:
            policy_file.attach(drafters)
            self._checks = IdleChecks(policy_file, rule is Rule.COUPLED, not policy_file.is_shape_invariant)

    @property
    def policy_file(self) -> PolicyFileController | None:
        return self._policy_file

    @property
    def idle_seconds(self) -> float | None:
        """Maximum seconds between calls of `between_steps`, which checks the policy file; None without a file."""
        return None if self._policy_file is None else WATCH_SECONDS

    def between_steps(self, waiting: int) -> None:
        """Apply the policy file and evaluate roll-outs; `waiting` requests are queued."""
        if self._policy_file is not None:
            kv_usage = 1 - self._cache.available_pages / self._cache.pool.num_pages
            self._policy_file.between_steps(waiting, kv_usage, self.totals)

    def observe(self, report: StepReport, preemptions: int) -> None:
        """Add a step to the statistics."""
        self._steps += 1
        self._replay_seconds += report.seconds.total
        if not self._is_replaying:  # a replay runs alone and serves no user
            self.totals.observe(report, preemptions)

    def ended(self, request: Request) -> None:
        """Pass an ended request to the checks and to its roll-out arms, or compare the answer if it was a replay."""
        if self._checks is None or self._policy_file is None:
            return
        if request.identity.assigned.is_replay:
            self._is_replaying = False
            pages = self._cache.available_pages
            self._checks.finished(request, ReplayTotals(self._replay_pages, pages, self._replay_seconds))
            return
        self._checks.ended(request)
        if arms := request.identity.assigned.arms:
            outcome = outcome_of(request, self._policy_file.document.prices)
            for arm in arms:
                self._policy_file.ended(arm, outcome)

    def next_replay(self) -> tuple[NewRequest, Assignment] | None:
        """Begin a replay: return an ended request to decode again in idle time; None: no roll-out needs one."""
        replay = None if self._checks is None else self._checks.next()
        if replay is not None:
            self._replay_pages, self._replay_seconds = self._cache.available_pages, 0.0
            self._is_replaying = True
        return replay

    def interrupted(self) -> None:
        """Record that a request has interrupted the replay, which is repeated later."""
        self._is_replaying = False

    def report(self, situation: Situation, seconds: StageSeconds, is_busy: bool) -> ControlReport:
        """Return the state of speculation, at most `REPORT_SECONDS` old; `seconds` are totals over all steps."""
        now, report = monotonic(), self._report
        has_news = not is_busy and self._steps != self._reported_steps
        if report is None or has_news or now - self._reported_at >= REPORT_SECONDS:
            report = self._report = self._new_report(situation, seconds, now)
            self._reported_at, self._reported_steps = now, self._steps
        return report

    def _new_report(self, situation: Situation, seconds: StageSeconds, now: float) -> ControlReport:
        policy, policy_file, totals = self._policy, self._policy_file, self.totals
        last = None if policy is None else policy.here  # the cost of the last pass if it had no drafts
        plain, speculative = totals.preemption_rates()
        host = seconds.total - seconds.draft - seconds.verify
        pages = self._cache.pool.num_pages
        prices = None if policy_file is None else policy_file.document.prices
        usage = Usage(
            wall_seconds=now - self._began,
            draft_seconds=seconds.draft,
            target_seconds=seconds.verify + seconds.accept,
            tokens=totals.tokens,
            draft_price=None if prices is None else prices.draft,
            target_price=None if prices is None else prices.target,
        )
        return ControlReport(
            enabled=situation.speculating,
            policy_file=None if policy_file is None else str(policy_file.path),
            pairs=self._pairs(situation),
            batch=0.0 if last is None else last.drawn,
            step_ms=0.0 if last is None else 1e3 * last.plain,
            row_ms=0.0 if last is None else 1e3 * (last.after(1) - last.plain),
            probe_share=0.0 if policy is None else policy.explorer.share,
            probe_seconds=0.0 if policy is None else policy.explorer.spent,
            reference_passes=0 if policy is None else policy.reference.passes,
            host_share=host / seconds.total if seconds.total else 0.0,
            provisional_pages=totals.provisional_pages,
            provisional_peak=totals.provisional_peak,
            kv_pages=pages,
            kv_usage=(pages - self._cache.available_pages) / pages if pages else 0.0,
            preemptions_plain=plain,
            preemptions_guessing=speculative,
            mismatches=0
            if policy_file is None
            else sum(p.mismatches for p in policy_file.rollouts.pairs.values()),
            usage=usage,
        )

    def _pairs(self, situation: Situation) -> tuple[PairReport, ...]:
        """Return the reports of pairs with draft requests or a roll-out, those with most draft requests first."""
        described = describe_pairs(self._policy, self.totals.pairs, situation)
        reports, policy_file, faults = dict(described), self._policy_file, self._drafters.fault_counts()
        if policy_file is not None:
            now = policy_file.rollouts.clock()
            for (drafter, cohort), rollout in list(policy_file.rollouts.pairs.items()):
                keys = [key for key in described if key[0] == drafter and is_of(key[1], cohort)]
                for key in keys or [(drafter, cohort)]:
                    reports[key] = _with_rollout(reports.get(key, PairReport(*key)), rollout, now)

        def fault_count(drafter: str) -> int:
            """Return the faults of a drafter in the policy file; for other drafters, all faults of their methods."""
            count = None if policy_file is None else policy_file.faults(drafter)
            if count is not None:
                return count
            methods = drafter.split("+")
            return sum(count for kind, count in faults.items() if kind.partition("/")[0] in methods)

        by_calls = sorted(reports.values(), key=lambda pair: (-pair.asks, pair.drafter, pair.cohort))
        return tuple(replace(pair, faults=fault_count(pair.drafter)) for pair in by_calls[:MOST_PAIRS])

    def move(self, drafter: str, cohort: str, state: str) -> None:
        """Move a roll-out to another stage on the operator's request; an invalid request is only logged."""
        try:
            if self._policy_file is None:
                raise RequestError("there is no policy file")
            self._policy_file.set_stage(drafter, cohort, state)
        except RequestError as error:
            _log.warning("%s for %s stays as it is: %s", drafter, cohort, error)
        self._report = None

    def close(self) -> None:
        if self._policy_file is not None:
            self._policy_file.close()


def _with_rollout(report: PairReport, rollout: PairRollout, now: float) -> PairReport:
    """Add the state of a roll-out to the report of its pair."""
    moves = [DecisionReport(now - move.at, move.stage.value, move.reason) for move in rollout.moves]
    # The policy does not decide about an unused drafter
    decisions = report.decisions if rollout.percent else ()
    newest_first = sorted([*decisions, *moves], key=lambda decision: decision.ago_seconds)
    return replace(
        report,
        state=rollout.stage.value,
        in_use=report.in_use and rollout.percent > 0,
        reason=rollout.reason,
        percent=rollout.percent,
        since_seconds=now - rollout.since,
        decisions=tuple(newest_first[:MOST_DECISIONS]),
    )


def outcome_of(request: Request, prices: Prices | None) -> Outcome:
    """Return a request's outcome for its arm of a roll-out."""
    accounting = request.accounting
    tokens = len(request.output_ids)
    later = tokens - accounting.first_tokens  # tokens after the pass of the first one
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
