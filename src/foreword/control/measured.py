"""The default policy: drafts where measured costs and acceptance promise a gain."""

from collections.abc import Sequence, Set
from dataclasses import replace
from weakref import ref

from foreword.acceptance.rules.rule import Rule
from foreword.control.acceptance import HEAD_COVERAGE, PRIOR_COVERAGE, Estimates, PairEstimate
from foreword.control.budget import ExplorationBudget
from foreword.control.decider import Decider
from foreword.control.explore import WATCH_STEPS, Explorer, Watch
from foreword.control.guard import CallWatch, ReferenceWindows
from foreword.control.hindsight import RequestFit, Waiting
from foreword.control.pairs import TRIAL_STEPS, Moment, PairControl
from foreword.control.records import (
    Arm,
    RequestRecord,
    fixed_plan,
    is_fixed,
    plans_of,
    present_name,
    wanted_rows,
)
from foreword.control.settings import ControlSettings
from foreword.control.trim import trimmed
from foreword.control.value import Pass
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftSource
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import RequestReport, StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest

TRY_STEPS = 3
"""Steps of which at most one tries drafters: finding one takes time."""

PAUSE = 4.0
"""Times the expected time of a shadow draft that is paid for it at most: an interruption is not its own."""

FEW_RECORDS = 64
"""Records of requests that are kept before those of ended requests are dropped."""


class MeasuredPolicy:
    """Drafts where that raises the expected tokens per second of the batch.

    Before drafting it decides, by cohort and drafter, whether to draft and how deep; after drafting, which nodes are
    verified. Drafts are compared with the text even where they were not verified, so that it is known when to begin
    again. A request's plan is an upper limit; a fixed plan is executed as it is.
    """

    def __init__(self, settings: ControlSettings | None = None, estimates: Estimates | None = None) -> None:
        self.settings = settings or ControlSettings()
        self.estimates = estimates or Estimates()
        self.budget = ExplorationBudget()
        self._watch = Watch(self.budget)
        self.reference = ReferenceWindows(self.settings)
        self.controls: dict[PairEstimate, PairControl] = {}
        self.steps = 0
        self.seconds = 0.0  # of all steps
        # By the request's number; those of ended requests are dropped now and then.
        self._records: dict[int, RequestRecord] = {}
        self._decider = Decider(self.settings)
        self._here: Pass | None = None  # the next pass
        # Requests of the last pass, if none got a draft and the same heads observed them.
        self._idle: list[int] = []
        self._idle_records: list[RequestRecord | None] = []  # of those of them that could get a draft
        self._has_tried = False  # whether a drafter was tried for them in the last pass
        self._call_watch = CallWatch()
        self._live_try: tuple[str, float] | None = None  # in the pass in flight, and what was paid for it
        self._waits = False  # whether a draft of one of them waits for its text
        self._is_quiet = False  # whether the pass in flight has nothing to learn from
        self._could_try = False  # whether the pass has requests that drafters can be tried for
        self._last_turn = -TRY_STEPS  # step
        self._most_records = FEW_RECORDS

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> Sequence[DraftPlan | None]:
        """Return the drafter and the depth for each request."""
        self._live_try = None
        if not any(entry.request.speculation for entry in entries):
            self._could_try = False
            return [None] * len(entries)
        numbers = [entry.request.request_id for entry in entries]
        if numbers == self._idle and self._stays_idle(entries):
            return self._tried([None] * len(entries), entries)
        self._is_quiet, self._waits = False, True
        records = [self._record(entry.request) for entry in entries]
        # The newest first: of the oldest little may be left to try a head in.
        for record in reversed(records):
            if record is not None and record.heads:
                record.is_watched = self._watch.takes(record, self.steps)
        asking = [
            record if record is not None and record.can_ask(entry) else None
            for entry, record in zip(entries, records, strict=True)
        ]
        here = self._here = self._decided(entries, asking, situation)
        is_reference = here is None or self.reference.begin_step(self._decider.plain_share)
        plans: list[DraftPlan | None] = []
        self._watch.begin_pass()
        running, could_try, self._could_try = len(entries), False, False
        for place, record in enumerate(records):
            if record is None:
                plans.append(fixed_plan(entries[place].request.speculation, running))
            elif asking[place] is None:
                plans.append(record.read())
            else:
                self._could_try = True
                plans.append(self._ask(record, running, is_reference))
                could_try = could_try or record.asked is None or len(record.arms) > 1
        if could_try and here is not None and not is_reference and self.budget.has_any and self._is_turn():
            self._explore(self._decider.pairs, asking, plans, here)
        is_idle = not is_reference and not any(plans) and all(not r or r.is_steady for r in records)
        self._idle, self._idle_records = (numbers, asking) if is_idle else ([], [])
        return plans

    def _stays_idle(self, entries: Sequence[PassEntry]) -> bool:
        """Return whether the same requests stay without drafts, and no evaluation is due."""
        here = self._here
        if here is None or not self.steps % WATCH_STEPS or here.rows != sum([entry.run for entry in entries]):
            return False
        return not self._decider.is_due(here, self.steps, self.seconds)

    def _tried(self, plans: list[DraftPlan | None], entries: Sequence[PassEntry]) -> list[DraftPlan | None]:
        """Return the plans of a pass without drafts, with the tries in it."""
        if self._has_tried:  # a pass that failed was never learned from
            self._has_tried = False
            for record in self._idle_records:
                if record is not None:
                    record.ask(None)
        affordable: set[PairControl] = set()
        if self._could_try and self._is_turn():
            affordable = self._decider.affordable(self.budget, self.seconds)
        if affordable and self._here is not None:
            for record, entry in zip(self._idle_records, entries, strict=True):
                if record is not None:
                    record.length = len(entry.request.tokens)
            self._explore(affordable, self._idle_records, plans, self._here)
            self._has_tried = any(plans)
        self._is_quiet = not self._waits and not self._has_tried
        return plans

    def _is_turn(self) -> bool:
        """Return whether drafters may be tried in this step; where few steps are planned, in each of them."""
        is_turn = self.steps - self._last_turn >= TRY_STEPS
        if is_turn:
            self._last_turn = self.steps
        return is_turn

    def _explore(
        self,
        affordable: set[PairControl],
        records: Sequence[RequestRecord | None],
        plans: list[DraftPlan | None],
        here: Pass,
    ) -> None:
        explorer = Explorer(self.budget, self.steps, self.seconds, affordable)
        explorer.explore(records, plans, here)
        self._live_try = explorer.live

    def _decided(
        self,
        entries: Sequence[PassEntry],
        records: Sequence[RequestRecord | None],
        situation: Situation,
    ) -> Pass | None:
        """Return the next pass as it would be without drafts, after an evaluation if one is due.

        Where no request can get a draft, as in a pass of prompts, there is nothing to decide.
        """
        here = self._decider.look(entries, situation)
        if here is None or not any(records):
            return here
        if not self._decider.is_due(here, self.steps, self.seconds):
            self._decider.recall(here)
            return here
        now = Moment(self.steps, self.seconds, self.reference.passes)
        here = self._decider.decide(records, here, situation, now)
        self._forget_controls()
        return here

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> Sequence[Draft]:
        """Return the nodes with which the whole batch makes the most tokens per second."""
        return trimmed(entries, drafts, self._records, self._here)

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation, beside: int = 1) -> int:
        """Return the rows of draft tokens with a net benefit for these requests."""
        running = len(requests) + beside
        return sum(wanted_rows(one, self._records.get(one.request_id), running) for one in requests)

    def learn(self, report: StepReport) -> None:
        """Compare drafts with the text, and the step's time with that of a plain step."""
        self.steps += 1
        self.seconds += report.seconds.total
        if self._could_try and self._here is not None and self._here.rows == self._here.drawn:
            # The budget earns in steps that only decode and have requests that drafters could be tried for.
            self.budget.earn(report.seconds.total, self._decider.probe_share, self._decider.idle_methods)
            if not self._watch.pay():
                self._idle = []
        self._measure(report, set() if self._is_quiet else self._follow(report))

    def _follow(self, report: StepReport) -> set[PairControl]:
        """Compare drafts with the text; return the pairs whose drafts were verified."""
        live: set[PairControl] = set()
        self._waits = False
        for part in report.requests:
            record = None if part.request.speculation is None else self._records.get(part.request.request_id)
            asked = None if record is None else record.asked
            if record is None or (asked is None and record.reader is None and not record.waiting):
                continue
            if asked is not None and part.asked == asked.plan.method:
                self._answered(record, asked, part, report.is_cold)
                if not record.is_probe:
                    live.add(asked.control)
            record.finish_pass(part.request.tokens)
            if part.applied:
                record.follow(part.request.tokens)
            else:
                record.waiting.clear()
            self._waits = self._waits or bool(record.waiting)
        return live

    def drafters(self) -> Sequence[Drafter]:
        return ()

    def use(self, settings: ControlSettings) -> None:
        """Use other settings from now on."""
        self.settings = self._decider.settings = settings

    @property
    def here(self) -> Pass | None:
        """The last pass as it would have been without drafts; None before any."""
        return self._here

    def notifies(self, request: StepRequest) -> bool:
        """Return whether heads observe this request in the planned pass: it costs time where they are not in use."""
        record = self._records.get(request.request_id)
        return record is None or record.is_observed or not record.heads

    def _answered(self, record: RequestRecord, asked: Arm, part: RequestReport, is_cold: bool) -> None:
        # A draft that is compared with the text counts as far as it had a net benefit, others as far as verified.
        is_compared = record.is_coupled or record.is_probe
        kept = record.kept_depth if is_compared else part.draft.depth
        asked.control.estimate.answered(record.asked_depth, record.offered_depth, kept)
        if record.is_probe:
            # Compiling is no part of the cost of a try, and a pause little of it.
            most = asked.control.probe_seconds * (1 if is_cold else PAUSE)
            self.budget.pay_probe(asked.plan.method, min(part.draft_seconds, most))
        elif part.applied and not record.is_coupled and len(part.draft):
            verified = part.draft.depth
            whole = record.asked_depth if verified == record.offered_depth else verified
            Waiting(asked.fit, part.draft, whole, verified).judge(part.verdict)

    def _measure(self, report: StepReport, live: Set[PairControl]) -> None:
        """Measure the gain of a step: its time, and that of the same tokens by plain decoding."""
        table, rows = self._decider.table, len(report.requests)
        if report.passes != 1 or not report.decodes_only or report.is_cold:
            return
        if not report.calls and report.rows == rows:
            self.reference.passes += 1
        if not live:
            self._settle(report, live, 0.0)  # there was no room for the draft that was to be tried
            return
        calls = {control.estimate.method: control.worth.draft_seconds for control in live}
        if self._call_watch.are_slow(report.seconds, sum(calls.values())):
            self._decider.evaluate_closely()
        drawn = sum([part.draws for part in report.requests])
        if rows >= len(table) or not drawn:
            return
        plain = table[rows] * report.tokens / drawn
        self._settle(report, live, min(report.seconds.total - plain, table[rows]))
        if any(part.asked and is_fixed(part.request) for part in report.requests):
            return  # a fixed plan's cost is not the gain of the others
        for control in live:
            # A try is paid for, and is no evidence against drafts that have an expected gain.
            if control.is_on:
                control.guard.gain.add(plain, report.seconds.total, drawn)

    def _settle(self, report: StepReport, live: Set[PairControl], lost: float) -> None:
        """Correct what was paid for a verified try by what its step has lost or won.

        Where other pairs draft, too, the two cannot be separated: the expected loss is paid then.
        """
        tried, self._live_try = self._live_try, None
        if tried is None or len(live) > 1:
            return
        method, paid = tried
        if all(part.asked in ("", method) for part in report.requests):
            self.budget.settle(method, lost - paid)

    def _record(self, request: StepRequest) -> RequestRecord | None:
        """Return the record of a request; None if nothing is decided for it."""
        plan = request.speculation
        if plan is None or plan.is_fixed:
            return None
        record = before = self._records.get(request.request_id)
        if plan.drafter.traits.may_be_absent:
            plan = replace(plan, method=present_name(plan))
            record = record if record is not None and record.method == plan.method else None
        if record is None:
            record = self._new_record(request, plan)
            if before is not None:
                record.is_observed, record.is_whole = before.is_observed, before.is_whole
        record.length = len(request.tokens)
        if record.heads:
            if before is not None and not record.is_observed:
                record.is_whole = False
            record.was_observed = record.is_observed
        return record

    def _new_record(self, request: StepRequest, plan: DraftPlan) -> RequestRecord:
        if len(self._records) >= self._most_records:
            self._records = {n: record for n, record in self._records.items() if record.request() is not None}
            self._most_records = max(2 * len(self._records), FEW_RECORDS)
        arms = [self._arm(request, one) for one in plans_of(plan)]
        record = RequestRecord(plan.method, arms, request.sampler.rule is Rule.COUPLED, ref(request))
        self._records[request.request_id] = record
        return record

    def _arm(self, request: StepRequest, plan: DraftPlan) -> Arm:
        traits = plan.drafter.traits
        coverage = HEAD_COVERAGE if traits.kind is DraftSource.HEAD else PRIOR_COVERAGE
        tenant, published = request.drafter_view.tenant, traits.acceptance_by_level
        estimate = self.estimates.pair(plan.method, tenant, request.cohort, coverage, published)
        estimate.need(min(plan.max_depth, plan.max_nodes))
        control = self.controls.get(estimate)
        if control is None:
            control = self.controls[estimate] = PairControl(estimate)
        is_old = self.seconds - control.looked_at >= self.settings.decision_seconds
        if is_old or not self._decider.knows(control):
            self._decider.evaluate_again()  # earlier decisions are old, or were made without it
        # Under other rules a drawn token may not be cut by its confidence.
        is_stopping = traits.stops_itself and request.sampler.rule is Rule.COUPLED
        return Arm(plan, control, RequestFit(estimate), is_stopping)

    def _forget_controls(self) -> None:
        if len(self.controls) > len(self.estimates.pairs):
            known = set(self.estimates.pairs.values())
            self.controls = {pair: control for pair, control in self.controls.items() if pair in known}

    def _ask(self, record: RequestRecord, running: int, is_reference: bool) -> DraftPlan | None:
        arm = None if is_reference else record.best_arm(running)
        if record.heads:
            record.is_observed = self._watch.observes(record)
        if arm is None:
            return record.ask(None)
        if arm.reading is not None and not record.was_observed:
            record.ask(None)
            return record.observe(arm)  # it has not observed the newest token
        control, step = arm.control, self.steps
        depth = control.worth.depth if record.is_coupled else control.worth.kept
        trial = 0 if step % TRIAL_STEPS else control.trial(step, min(arm.plan.max_depth, arm.plan.max_nodes))
        goes_on = arm.is_stopping and not step % TRIAL_STEPS  # to measure the acceptance of what follows
        if trial:
            depth = max(depth, trial) if record.is_coupled else trial
        depth = depth if control.is_cost_known else control.varied(depth, step)
        plan = record.ask(arm, depth, stops=not goes_on)
        record.trial_depth = 0 if plan is not None and plan.stop is not None else trial
        return plan
