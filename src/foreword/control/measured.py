"""The policy that guesses only where it pays, by what was measured."""

from collections.abc import Sequence, Set
from dataclasses import replace
from weakref import WeakKeyDictionary

from foreword.acceptance.rules.rule import Rule
from foreword.control.arms import Arm, Moment, PairControl, RequestRecord
from foreword.control.asking import Group, Pass, weigh
from foreword.control.estimates import Estimates, PairEstimate
from foreword.control.exploring import Explorer
from foreword.control.guard import ReferenceWindows
from foreword.control.hindsight import RequestFit, Waiting
from foreword.control.probes import TimeBank
from foreword.control.settings import ControlSettings
from foreword.control.trimming import Offer, choose, survivals, tightest_limit
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, choices_of
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import RequestReport, StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest

STEADY = 0.12
"""Part by which a batch may grow or shrink before everything is looked at again."""


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
        self.reference = ReferenceWindows(self.settings)
        self.controls: dict[PairEstimate, PairControl] = {}
        self.steps = 0
        self.seconds = 0.0  # of all steps
        self._records: WeakKeyDictionary[StepRequest, RequestRecord] = WeakKeyDictionary()
        self._here: Pass | None = None
        self._table: list[float] = []
        self._table_context = 0
        self._decided_at: tuple[int, int, int] | None = None  # step, tokens, rows
        self._probe_share = self.settings.probe_share
        self._plain_share = 0.0
        self._is_settled = True  # whether what drafters cost is known

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> Sequence[DraftPlan | None]:
        """Whom to ask for which request, and how deep."""
        records = [self._record(entry) for entry in entries]
        here = self._here = self._look(entries, situation)
        if here is None:
            return [self._fixed(entry, len(entries)) for entry in entries]
        if self._is_due(here):
            self._decide(records, here, len(entries), situation)
        is_reference = self.reference.begin_step(self._plain_share)
        plans = [
            self._fixed(entry, len(entries))
            if record is None
            else self._ask(record, len(entries), is_reference)
            for entry, record in zip(entries, records, strict=True)
        ]
        if not is_reference and self.bank.balance > 0:
            Explorer(self.bank, self.steps, self.seconds).explore(records, plans, here)
        return plans

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> Sequence[Draft]:
        """The nodes with which the whole batch makes the most tokens per second.

        Under *token* and *block* what was drawn is left as it is: its depth was fixed before.
        """
        here, kept = self._here, list(drafts)
        offers: list[Offer] = []
        places: list[int] = []
        rows, tokens, spent = 0, 0.0, {}
        for place, (entry, draft) in enumerate(zip(entries, drafts, strict=True)):
            record = self._records.get(entry.request) if len(draft) else None
            if record is None or record.asked is None:
                rows += len(draft)
                continue
            arm = record.asked
            record.offered_depth = draft.depth
            if record.is_coupled or record.is_probe:
                record.keep_aside(draft)
            if record.is_probe:
                kept[place] = draft.within(0, 0)
                continue
            chances = survivals(draft, arm.control.estimate.rates, arm.fit.shift)
            spent[arm.plan.method] = arm.control.worth.draft_seconds
            if draft.drawn and not record.is_coupled:
                rows, tokens = rows + len(draft), tokens + sum(chances)
            else:
                offers.append(Offer(entry.request.request_id, draft, chances))
                places.append(place)
        if offers and here is not None:
            beside = replace(here, rows=here.rows + rows, drawn=here.drawn + tokens) if rows else here
            chosen = choose(offers, beside, sum(spent.values()), tightest_limit(entries))
            for place, draft in zip(places, chosen, strict=True):
                kept[place] = draft
        return kept

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation) -> int:
        """Rows that guesses for these requests are worth at present."""
        rows = 0
        for request in requests:
            record = self._records.get(request)
            arm = None if record is None else self._best(record, len(requests) + 1)
            if arm is not None:
                rows += min(arm.control.worth.kept, arm.plan.max_nodes)
            elif request.speculation is not None and request.speculation.is_fixed:
                rows += request.speculation.max_nodes
        return rows

    def learn(self, report: StepReport) -> None:
        """Compare drafts with what came of them, and the step's time with a plain one's."""
        self.steps += 1
        self.seconds += report.seconds.total
        self.bank.earn(report.seconds.total, self._probe_share)
        live: set[PairControl] = set()
        for part in report.requests:
            record = self._records.get(part.request)
            if record is None:
                continue
            asked = record.asked
            if asked is not None and part.asked == asked.plan.method:
                self._answered(record, asked, part)
                if not record.is_probe:
                    live.add(asked.control)
            record.asked = None
            if part.applied:
                record.follow(part.request.tokens)
            else:
                record.waiting.clear()
        self._measure(report, live)

    def drafters(self) -> Sequence[Drafter]:
        return ()

    @property
    def here(self) -> Pass | None:
        """The last pass as it would have been without guesses; None before any."""
        return self._here

    def _answered(self, record: RequestRecord, asked: Arm, part: RequestReport) -> None:
        asked.control.estimate.answered(record.asked_depth, record.offered_depth)
        if record.is_probe:
            self.bank.pay(part.draft_seconds)
        elif part.applied and not record.is_coupled and len(part.draft):
            Waiting(asked.fit, part.draft).judge(part.verdict)

    def _measure(self, report: StepReport, live: Set[PairControl]) -> None:
        """What the step took, and what the same tokens would have taken plainly."""
        if report.passes != 1 or not report.decodes_only or not self._table:
            return
        drawn = sum(part.draws for part in report.requests)
        rows = sum(part.run for part in report.requests)
        if not report.calls and report.rows == rows:
            self.reference.passes += 1
        if not live or rows >= len(self._table) or not drawn:
            return
        tokens = sum(len(part.verdict.tokens) for part in report.requests)
        plain = self._table[rows] * tokens / drawn
        for control in live:
            control.guard.gain.add(plain, report.seconds.total, drawn)

    def _record(self, entry: PassEntry) -> RequestRecord | None:
        """None for requests that nothing is decided for."""
        request = entry.request
        if not entry.draws or request.speculation is None or request.speculation.is_fixed:
            return None
        record = self._records.get(request)
        if record is None:
            arms = [self._arm(request, plan) for plan in _choices(request.speculation)]
            record = self._records[request] = RequestRecord(arms, request.sampler.rule is Rule.COUPLED)
        return record

    def _arm(self, request: StepRequest, plan: DraftPlan) -> Arm:
        estimate = self.estimates.pair(plan.method, request.tenant, request.cohort)
        control = self.controls.get(estimate)
        if control is None:
            control = self.controls[estimate] = PairControl(estimate)
            self._decided_at = None
        return Arm(plan, control, RequestFit(estimate))

    def _look(self, entries: Sequence[PassEntry], situation: Situation) -> Pass | None:
        """The pass without guesses; None before any step was measured, or if nothing is drawn."""
        drawn, rows, context, guesses = 0, 0, 0, 1
        for entry in entries:
            drawn += entry.draws
            rows += entry.run
            context = max(context, entry.computed)
            plan = entry.request.speculation
            guesses += 0 if plan is None else plan.max_nodes
        if (
            rows + guesses >= len(self._table)
            or 2 * context < self._table_context
            or context > 2 * self._table_context
        ):
            self._read_costs(rows + guesses, context, situation)
        return Pass.of(drawn, rows, self._table) if self._table and drawn else None

    def _read_costs(self, rows: int, context: int, situation: Situation) -> None:
        self._table = situation.costs.step_table(max(2 * rows, 64), context) or []
        self._table_context = max(context, 64)

    def _is_due(self, here: Pass) -> bool:
        if self._decided_at is None:
            return True
        step, drawn, rows = self._decided_at
        moved = max(abs(here.drawn - drawn) / max(drawn, 1), abs(here.rows - rows) / max(rows, 1))
        wait = self.settings.decision_steps if self._is_settled else 2
        return moved > STEADY or self.steps - step >= wait

    def _decide(
        self, records: Sequence[RequestRecord | None], here: Pass, running: int, situation: Situation
    ) -> None:
        """Look at all pairs that the batch has requests of."""
        self._read_costs(len(self._table) // 2, self._table_context, situation)
        here = self._here = replace(here, seconds=self._table)
        present: dict[str, dict[PairControl, list[DraftPlan]]] = {}
        for record in records:
            for arm in () if record is None else record.arms:
                present.setdefault(arm.plan.method, {}).setdefault(arm.control, []).append(arm.plan)
        now = Moment(self.steps, self.seconds, self.reference.passes)
        for method, pairs in present.items():
            self._decide_method(method, pairs, here, situation, now)
        controls = [control for pairs in present.values() for control in pairs]
        self._probe_share = self._share_for_probes(controls)
        self._plain_share = self._share_for_reference(controls)
        self._is_settled = all(control.is_cost_known for control in controls)
        self._decided_at = self.steps, int(here.drawn), here.rows
        self._forget_controls()

    def _decide_method(
        self,
        method: str,
        pairs: dict[PairControl, list[DraftPlan]],
        here: Pass,
        situation: Situation,
        now: Moment,
    ) -> None:
        def draft_seconds(levels: int, asks: int) -> float:
            return situation.costs.draft_seconds(method, levels, asks)

        groups = []
        for control, plans in pairs.items():
            control.estimate.refresh(now.seconds)
            depth = max(min(plan.max_depth, plan.max_nodes) for plan in plans)
            groups.append(Group(control.estimate.rates, len(plans), min(depth, self.settings.max_depth)))
        worths = weigh(here, groups, draft_seconds)
        is_known = situation.costs.knows_calls(method)
        for control, group, worth in zip(pairs, groups, worths, strict=True):
            control.decide(worth, is_known, self.settings, now)
            control.price(group.depth, here, draft_seconds)

    def _share_for_probes(self, present: Sequence[PairControl]) -> float:
        """The more there is to find out, the more."""
        settings = self.settings
        if any(control.estimate.is_unsettled or not control.is_cost_known for control in present):
            return settings.probe_share
        near = any(control.worth.gain >= settings.hopeless for control in present)
        return settings.watch_share if near else settings.idle_probe_share

    def _forget_controls(self) -> None:
        if len(self.controls) > len(self.estimates.pairs):
            known = set(self.estimates.pairs.values())
            self.controls = {pair: control for pair, control in self.controls.items() if pair in known}

    def _share_for_reference(self, present: Sequence[PairControl]) -> float:
        """Nothing where nobody guesses anyway, half where every measured gain is well above the line."""
        gains = [control.guard.gain.bounds() for control in present if control.is_on]
        well = all(found is not None and found[0] > 1.05 for found in gains)
        return self.settings.reference_share * (0.5 if well else 1.0) if gains else 0.0

    def _fixed(self, entry: PassEntry, running: int) -> DraftPlan | None:
        plan = entry.request.speculation
        return plan if plan is not None and plan.is_fixed and plan.allows(running) else None

    def _ask(self, record: RequestRecord, running: int, is_reference: bool) -> DraftPlan | None:
        arm = None if is_reference else self._best(record, running)
        if arm is None:
            return record.ask(None)
        worth = arm.control.worth
        return record.ask(arm, worth.depth if record.is_coupled else worth.kept)

    def _best(self, record: RequestRecord, running: int) -> Arm | None:
        paying = [arm for arm in record.arms if arm.pays and arm.plan.allows(running)]
        return paying[0] if len(paying) == 1 else max(paying, key=lambda arm: arm.promise, default=None)


def _choices(plan: DraftPlan) -> list[DraftPlan]:
    """The plans of those that a plan leaves the choice between."""
    choices = choices_of(plan.drafter)
    return [replace(plan, method=name, drafter=drafter) for name, drafter in choices.items()] or [plan]
