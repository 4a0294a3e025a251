"""The policy that guesses only where it pays, by what was measured."""

from collections.abc import Sequence, Set
from dataclasses import replace
from weakref import ref

from foreword.acceptance.rules.rule import Rule
from foreword.control.decisions.arms import TRIAL_STEPS, Arm, Moment, PairControl
from foreword.control.decisions.asking import Pass
from foreword.control.decisions.choosing import (
    best_arm,
    can_ask,
    fixed_plan,
    is_fixed,
    plans_of,
    present_name,
    wanted_rows,
)
from foreword.control.decisions.deciding import Decider
from foreword.control.decisions.records import RequestRecord
from foreword.control.decisions.trimming import trimmed
from foreword.control.guard import CallWatch, ReferenceWindows
from foreword.control.learning.at_large import HEAD_COVERAGE, PRIOR_COVERAGE
from foreword.control.learning.estimates import Estimates, PairEstimate
from foreword.control.learning.exploring import Explorer
from foreword.control.learning.hindsight import RequestFit, Waiting
from foreword.control.learning.probes import TimeBank
from foreword.control.learning.watching import WATCH_STEPS, Watch
from foreword.control.settings import ControlSettings
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftSource
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import RequestReport, StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest

TRY_STEPS = 3
"""Of so many steps, in one at most it is looked whether a drafter can be tried: looking takes time."""

PAUSE = 4.0
"""Times what was expected of a probe that it is billed at most: what interrupts it is not its own."""

FEW_RECORDS = 64
"""Records of requests that are kept before those of requests that are gone are looked for."""


class MeasuredPolicy:
    """Asks a drafter where its guesses are expected to bring more than they cost, and verifies those that do.

    Before drafting it decides, by cohort and drafter, whether to ask and how deep; when drafts are there, which of
    their nodes get a row. Drafts are compared with the text that came even where they were not verified: that tells
    when to begin again. What was asked for is the most that is done; a plan that is fixed is done as it stands.
    """

    def __init__(self, settings: ControlSettings | None = None, estimates: Estimates | None = None) -> None:
        self.settings = settings or ControlSettings()
        self.estimates = estimates or Estimates()
        self.bank = TimeBank()
        self._watch = Watch(self.bank)
        self.reference = ReferenceWindows(self.settings)
        self.controls: dict[PairEstimate, PairControl] = {}
        self.steps = 0
        self.seconds = 0.0  # of all steps
        # By the request's number; those of requests that are gone are dropped now and then.
        self._records: dict[int, RequestRecord] = {}
        self._decider = Decider(self.settings)
        self._here: Pass | None = None  # the next pass
        # Requests of the last pass, if nobody was asked and the same heads were told.
        self._idle: list[int] = []
        self._idle_records: list[RequestRecord | None] = []  # of those of them that could be asked
        self._has_tried = False  # whether a drafter was tried for them in the last pass
        self._call_watch = CallWatch()
        self._live_try: tuple[str, float] | None = None  # in the pass under way, and what was paid for it
        self._waits = False  # whether a draft for one of them waits for its text
        self._is_quiet = False  # whether no request of the pass under way has anything to be learned from
        self._could_try = False  # whether the pass has requests that drafters can be tried for
        self._last_turn = -TRY_STEPS  # step
        self._most_records = FEW_RECORDS

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> Sequence[DraftPlan | None]:
        """Whom to ask for which request, and how deep."""
        self._live_try = None
        if not any(entry.request.speculation for entry in entries):
            self._could_try = False
            return [None] * len(entries)
        numbers = [entry.request.request_id for entry in entries]
        if numbers == self._idle and self._stays_idle(entries):
            return self._tried([None] * len(entries), entries)
        self._is_quiet, self._waits = False, True
        records = [self._record(entry.request) for entry in entries]
        # The newest first: of the oldest little may be left to try a head for.
        for record in reversed(records):
            if record is not None and record.heads:
                record.is_watched = self._watch.takes(record, self.steps)
        asking = [
            record if record is not None and can_ask(entry, record) else None
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
        if could_try and here is not None and not is_reference and self.bank.has_any and self._is_turn():
            self._explore(self._decider.pairs, asking, plans, here)
        is_idle = not is_reference and not any(plans) and all(not r or r.is_steady for r in records)
        self._idle, self._idle_records = (numbers, asking) if is_idle else ([], [])
        return plans

    def _stays_idle(self, entries: Sequence[PassEntry]) -> bool:
        """Whether nothing is asked for the same requests as in the step before, and it is no time to look."""
        here = self._here
        if here is None or not self.steps % WATCH_STEPS or here.rows != sum([entry.run for entry in entries]):
            return False
        return not self._decider.is_due(here, self.steps, self.seconds)

    def _tried(self, plans: list[DraftPlan | None], entries: Sequence[PassEntry]) -> list[DraftPlan | None]:
        """The plans of a pass in which nobody is asked, with what is tried in it."""
        if self._has_tried:  # a pass that failed was never learned from
            self._has_tried = False
            for record in self._idle_records:
                if record is not None:
                    record.ask(None)
        affordable: set[PairControl] = set()
        if self._could_try and self._is_turn():
            affordable = self._decider.affordable(self.bank, self.seconds)
        if affordable and self._here is not None:
            for record, entry in zip(self._idle_records, entries, strict=True):
                if record is not None:
                    record.length = len(entry.request.tokens)
            self._explore(affordable, self._idle_records, plans, self._here)
            self._has_tried = any(plans)
        self._is_quiet = not self._waits and not self._has_tried
        return plans

    def _is_turn(self) -> bool:
        """Whether it is looked who can be tried; where few steps are planned, in each of them."""
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
        explorer = Explorer(self.bank, self.steps, self.seconds, affordable)
        explorer.explore(records, plans, here)
        self._live_try = explorer.live

    def _decided(
        self,
        entries: Sequence[PassEntry],
        records: Sequence[RequestRecord | None],
        situation: Situation,
    ) -> Pass | None:
        """The next pass as it would be without guesses, after a new look at everything if it is time for one.

        Where nobody can be asked, as while prompts are read, there is nothing to decide: what was decided of passes
        like those before it holds again behind it.
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
        """The nodes with which the whole batch makes the most tokens per second."""
        return trimmed(entries, drafts, self._records, self._here)

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation, beside: int = 1) -> int:
        """Rows that guesses for these requests are worth at present."""
        running = len(requests) + beside
        return sum(wanted_rows(one, self._records.get(one.request_id), running) for one in requests)

    def learn(self, report: StepReport) -> None:
        """Compare drafts with what came of them, and the step's time with a plain one's."""
        self.steps += 1
        self.seconds += report.seconds.total
        if self._could_try and self._here is not None and self._here.rows == self._here.drawn:
            # Of decoding alone, for those that something could be found out about: it is paid by them.
            self.bank.earn(report.seconds.total, self._decider.probe_share, self._decider.idle_methods)
            if not self._watch.pay():
                self._idle = []
        self._measure(report, set() if self._is_quiet else self._follow(report))

    def _follow(self, report: StepReport) -> set[PairControl]:
        """Compare drafts with the text that came; returns whose were verified."""
        live: set[PairControl] = set()
        self._waits = False
        for part in report.requests:
            # Most are plain, and finding nothing takes as long as finding something.
            record = None if part.request.speculation is None else self._records.get(part.request.request_id)
            asked = None if record is None else record.asked
            if record is None or (asked is None and record.reader is None and not record.waiting):
                continue
            if asked is not None and part.asked == asked.plan.method:
                self._answered(record, asked, part, report.is_cold)
                if not record.is_probe:
                    live.add(asked.control)
            record.heard(part.request.tokens)
            if part.applied:
                record.follow(part.request.tokens)
            else:
                record.waiting.clear()
            self._waits = self._waits or bool(record.waiting)
        return live

    def drafters(self) -> Sequence[Drafter]:
        return ()

    def use(self, settings: ControlSettings) -> None:
        """Other numbers from now on."""
        self.settings = self._decider.settings = settings

    @property
    def here(self) -> Pass | None:
        """The last pass as it would have been without guesses; None before any."""
        return self._here

    def tells(self, request: StepRequest) -> bool:
        """Whether heads are told of this request in the pass that was planned: where they are not in use it costs."""
        record = self._records.get(request.request_id)
        return record is None or record.is_told or not record.heads

    def _answered(self, record: RequestRecord, asked: Arm, part: RequestReport, is_cold: bool) -> None:
        # What is compared with the text counts as far as it was worth verifying, other drafts as far as they were.
        is_compared = record.is_coupled or record.is_probe
        kept = record.kept_depth if is_compared else part.draft.depth
        asked.control.estimate.answered(record.asked_depth, record.offered_depth, kept)
        if record.is_probe:
            # What is compiled once is no part of what probes take, and a pause little of it.
            most = asked.control.probe_seconds * (1 if is_cold else PAUSE)
            self.bank.pay_probe(asked.plan.method, min(part.draft_seconds, most))
        elif part.applied and not record.is_coupled and len(part.draft):
            verified = part.draft.depth
            whole = record.asked_depth if verified == record.offered_depth else verified
            Waiting(asked.fit, part.draft, whole, verified).judge(part.verdict)

    def _measure(self, report: StepReport, live: Set[PairControl]) -> None:
        """What the step took, and what the same tokens would have taken plainly."""
        table, rows = self._decider.table, len(report.requests)
        if report.passes != 1 or not report.decodes_only or report.is_cold:
            return
        if not report.calls and report.rows == rows:
            self.reference.passes += 1
        if not live:
            self._settle(report, live, 0.0)  # what was tried has found no room for a guess
            return
        calls = {control.estimate.method: control.worth.draft_seconds for control in live}
        if self._call_watch.are_slow(report.seconds, sum(calls.values())):
            self._decider.look_closely()
        drawn = sum([part.draws for part in report.requests])
        if rows >= len(table) or not drawn:
            return
        plain = table[rows] * report.tokens / drawn
        self._settle(report, live, min(report.seconds.total - plain, table[rows]))
        if any(part.asked and is_fixed(part.request) for part in report.requests):
            return  # what those make of a step says nothing of the others
        for control in live:
            # What a try loses is paid for, and says nothing of guesses that were expected to pay.
            if control.is_on:
                control.guard.gain.add(plain, report.seconds.total, drawn)

    def _settle(self, report: StepReport, live: Set[PairControl], lost: float) -> None:
        """A try takes from the bank what its step has really lost, or leaves there what it has won.

        Where others guess, too, that cannot be told apart: what was expected of it is paid then.
        """
        tried, self._live_try = self._live_try, None
        if tried is None or len(live) > 1:
            return
        method, paid = tried
        if all(part.asked in ("", method) for part in report.requests):
            self.bank.settle(method, lost - paid)

    def _record(self, request: StepRequest) -> RequestRecord | None:
        """None for requests that nothing is decided for."""
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
                record.is_told, record.is_whole = before.is_told, before.is_whole
        record.length = len(request.tokens)
        if record.heads:
            if before is not None and not record.is_told:
                record.is_whole = False
            record.was_told = record.is_told
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
        told = traits.acceptance_by_level
        estimate = self.estimates.pair(
            plan.method, request.drafter_view.tenant, request.cohort, coverage, told
        )
        estimate.need(min(plan.max_depth, plan.max_nodes))
        control = self.controls.get(estimate)
        if control is None:
            control = self.controls[estimate] = PairControl(estimate)
        is_old = self.seconds - control.looked_at >= self.settings.decision_seconds
        if is_old or not self._decider.knows(control):
            self._decider.look_again()  # what was decided of it may hold no longer, and of others without it
        # What is drawn under other rules may not be cut by how sure a drafter is of it.
        is_stopping = traits.stops_itself and request.sampler.rule is Rule.COUPLED
        return Arm(plan, control, RequestFit(estimate), is_stopping)

    def _forget_controls(self) -> None:
        if len(self.controls) > len(self.estimates.pairs):
            known = set(self.estimates.pairs.values())
            self.controls = {pair: control for pair, control in self.controls.items() if pair in known}

    def _ask(self, record: RequestRecord, running: int, is_reference: bool) -> DraftPlan | None:
        arm = None if is_reference else best_arm(record, running)
        if record.heads:
            record.is_told = self._watch.tells(record)
        if arm is None:
            return record.ask(None)
        if arm.reading is not None and not record.was_told:
            record.ask(None)
            return record.tell(arm)  # it knows nothing of the newest token
        control, step = arm.control, self.steps
        depth = control.worth.depth if record.is_coupled else control.worth.kept
        trial = 0 if step % TRIAL_STEPS else control.trial(step, min(arm.plan.max_depth, arm.plan.max_nodes))
        goes_on = arm.is_stopping and not step % TRIAL_STEPS  # so that it is known what comes behind
        if trial:
            depth = max(depth, trial) if record.is_coupled else trial
        depth = depth if control.is_cost_known else control.varied(depth, step)
        plan = record.ask(arm, depth, stops=not goes_on)
        record.trial_depth = 0 if plan is not None and plan.stop is not None else trial
        return plan
