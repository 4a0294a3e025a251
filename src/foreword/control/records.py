"""A request as the policy keeps it: its possible drafters, and which of them drafts, observes or is tried."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from foreword.control.hindsight import RequestFit, Waiting
from foreword.control.pairs import PairControl
from foreword.kv.extra_rows import KEPT_STATES
from foreword.speculation.confidence import Stop
from foreword.speculation.draft import Draft
from foreword.speculation.requests import DraftPlan, PassEntry, ShadowDraft, StepRequest

MOST_WAITING = 4
"""Drafts of one request that wait for their text; the oldest is given up for another."""


@dataclass(eq=False)
class Arm:
    """One drafter for one request."""

    plan: DraftPlan  # the most that may be requested
    control: PairControl
    fit: RequestFit
    is_stopping: bool = False  # whether its drafts end where going on has no benefit
    observed: int = 0  # tokens of the text that the drafter has observed, or drafted after
    _planned: DraftPlan | None = None

    def lag(self, length: int) -> int:
        """Return the tokens of a text of this length that it has to catch up with; of a head, those with states."""
        missed = max(length - self.observed, 0)
        return missed if self.reading is None else min(missed, KEPT_STATES)

    def planned(self, depth: int, lag: int, stop: Stop | None) -> DraftPlan:
        """Return the plan for drafts of at most this depth, by a drafter that lags by this many tokens."""
        depth, planned = min(depth, self.plan.max_depth), self._planned
        if planned is None or planned.max_depth != depth or planned.stop is not stop:
            is_same = depth == self.plan.max_depth and stop is None
            planned = self.plan if is_same else replace(self.plan, max_depth=depth, stop=stop)
            self._planned = planned
        return replace(planned, lag=lag) if lag > 0 else planned

    def stop(self, stops: bool) -> Stop | None:
        """Return where its drafts for this request end, or that they go on; None: it does not stop itself."""
        if not self.is_stopping:
            return None
        return self.control.stop(self.fit.shift if stops else None)

    def levels_with_benefit(self, draft: Draft) -> int:
        """Return the levels of a draft with a net benefit; all of it without confidences."""
        if not draft.confidence or not draft.is_chain:
            return draft.depth
        chances = self.control.estimate.rates.survivals(draft, self.fit.shift)
        for level, (chance, least) in enumerate(zip(chances, self.control.worth.least, strict=False)):
            if chance < least:
                return level
        return len(draft)

    @cached_property
    def reading(self) -> DraftPlan | None:
        """The plan for a pass in which a head observes without drafting; None: it is no head."""
        has_states = bool(self.plan.drafter.traits.needs.taps)
        return replace(self.plan, max_nodes=0, max_depth=0) if has_states else None

    @cached_property
    def is_lookup(self) -> bool:
        """Whether it needs nothing but the text."""
        return not self.plan.drafter.traits.needs

    @property
    def pays(self) -> bool:
        """Whether drafting for this request has an expected gain."""
        worth = self.control.worth
        return self.control.in_use and self.fit.shift >= worth.least_shift and worth.gain > 0

    @property
    def promise(self) -> float:
        """The expected gain for this request, to be compared with other drafters."""
        worth, rates = self.control.worth, self.control.estimate.rates
        usual, own = sum(rates.survival(0)[: worth.kept]), sum(rates.survival(self.fit.shift)[: worth.kept])
        return worth.gain * own / usual if usual > 0 else worth.gain


@dataclass(eq=False)
class RequestRecord:
    """What the policy keeps of a request while it runs."""

    method: str  # of its plan when the record was made
    arms: list[Arm]
    is_coupled: bool  # whether a draft token is accepted if and only if it is the token that comes
    request: Callable[[], StepRequest | None]  # None: it has ended
    is_watched: bool = False  # whether heads observe it though they are not in use
    is_observed: bool = False  # whether heads observe the pass in flight
    was_observed: bool = False  # and the one before
    is_whole: bool = True  # whether heads have observed all passes
    length: int = 0  # tokens of its text
    reader: Arm | None = None  # the head that observes the pass in flight without drafting
    waiting: list[Waiting] = field(default_factory=list)
    asked: Arm | None = None  # the drafter of the pass in flight
    asked_depth: int = 0
    is_probe: bool = False  # whether the draft is only compared with the text
    offered_depth: int = 0  # of the draft
    kept_depth: int = 0  # levels of it with a net benefit
    trial_depth: int = 0  # levels that are verified in any case; 0: those with a net benefit

    def ask(
        self, arm: Arm | None, depth: int = 0, is_probe: bool = False, stops: bool = True
    ) -> DraftPlan | None:
        """Begin a pass with a draft of this drafter, or without one; return its plan.

        The draft ends where going on has no benefit, if the drafter can do that and `stops`.
        """
        self.asked, self.asked_depth, self.is_probe = arm, depth, is_probe
        self.offered_depth = self.kept_depth = self.trial_depth = 0
        if arm is None:
            return None
        return arm.planned(depth, arm.lag(self.length), arm.stop(stops))

    @cached_property
    def heads(self) -> list[Arm]:
        """The drafters that need the hidden states of the whole prompt."""
        return [arm for arm in self.arms if arm.reading is not None]

    def may_ask(self, arm: Arm) -> bool:
        """Return whether a drafter's acceptance is that of its estimate.

        A head that has not observed all of a text drafts worse: where other drafters can be used it is left out, or its
        estimate would depend on when it was used.
        """
        return self.is_whole or arm.reading is None or len(self.arms) == 1

    @property
    def has_head_in_use(self) -> bool:
        """Whether a head drafts, or has a gain and may soon: not observing, it would be lost for the text."""
        for head in self.heads:
            control = head.control
            if control.is_on and self.may_ask(head) and not (control.is_left and self._is_settled):
                return True
        return False

    @property
    def _is_settled(self) -> bool:
        """Whether the drafters in use are measured: a new one was preferred on its expected gain alone."""
        return not any(arm.control.in_use and arm.control.estimate.is_new for arm in self.arms)

    @property
    def is_steady(self) -> bool:
        """Whether heads observe it as they did in the pass before."""
        return self.is_observed is self.was_observed

    def read(self) -> DraftPlan | None:
        """Begin a pass of the prompt, which a head that may draft after it observes; return its plan."""
        self.ask(None)
        may = [arm for arm in self.heads if self.is_watched or arm.control.may_draft]
        return self.observe(max(may, key=lambda arm: arm.control.worth.gain, default=None))

    def observe(self, head: Arm | None) -> DraftPlan | None:
        """Let this head observe the pass without drafting; return its plan."""
        self.reader, self.is_observed = head, head is not None
        return None if head is None else head.reading

    def finish_pass(self, tokens: list[int]) -> None:
        """Note that the drafter of the pass, and the head that observed it, know the text."""
        if self.asked is not None:
            self.asked.observed = len(tokens)
        if self.reader is not None:
            self.reader.observed = len(tokens)
        self.asked = self.reader = None

    def ask_aside(self, arm: Arm, depth: int) -> ShadowDraft:
        """Return a shadow draft request beside the draft that is verified."""
        fit = arm.fit

        def keep(draft: Draft) -> None:
            kept = arm.levels_with_benefit(draft)
            fit.pair.answered(depth, draft.depth, kept)
            if len(draft):
                self.waiting.append(Waiting(fit, draft, depth, kept))

        plan = arm.planned(depth, arm.lag(self.length), None)
        arm.observed = self.length
        return ShadowDraft(plan, keep)

    def keep_aside(self, draft: Draft) -> None:
        """Keep a draft that is compared with the text when it has come."""
        assert self.asked is not None
        self.waiting.append(Waiting(self.asked.fit, draft, self.asked_depth, self.kept_depth))
        if len(self.waiting) > MOST_WAITING:
            del self.waiting[0]

    def waits_for(self, arm: Arm) -> bool:
        """Return whether the text of its last draft has not come yet.

        Verified, it would be called again after its draft, not within: called more often where it is right, it would
        look as if it had a draft more often.
        """
        return any(waiting.fit is arm.fit for waiting in self.waiting)

    def follow(self, tokens: list[int]) -> None:
        """Compare the waiting drafts with the text, which has grown."""
        if len(self.waiting) == 1:  # nearly always
            if self.waiting[0].follow(tokens):
                self.waiting.clear()
        else:
            self.waiting = [waiting for waiting in self.waiting if not waiting.follow(tokens)]

    def best_arm(self, running: int) -> Arm | None:
        """Return the drafter with the highest expected gain for the request; None: none has one."""
        best: Arm | None = None
        for arm in self.arms:
            if not arm.pays or not arm.plan.allows(running) or not self.may_ask(arm):
                continue
            if best is None or arm.promise > best.promise:
                best = arm
        return best

    def can_ask(self, entry: PassEntry) -> bool:
        """Return whether a drafter could draft in this pass: a head has the states of a prompt only after it."""
        return entry.draws and (entry.run == 1 or not self.heads)


def is_fixed(request: StepRequest) -> bool:
    """Return whether the policy decides nothing for a request: its plan is executed as it is."""
    return request.speculation is not None and request.speculation.is_fixed


def fixed_plan(plan: DraftPlan | None, running: int) -> DraftPlan | None:
    """Return a plan that is executed as it is; None: there is none."""
    return plan if plan is not None and plan.is_fixed and plan.allows(running) else None


def wanted_rows(request: StepRequest, record: RequestRecord | None, running: int) -> int:
    """Return the rows of draft tokens with a net benefit for a request."""
    arm = None if record is None else record.best_arm(running)
    if arm is not None:
        return min(arm.control.worth.kept, arm.plan.max_nodes)
    plan = request.speculation
    return plan.max_nodes if plan is not None and plan.is_fixed else 0


def present_name(plan: DraftPlan) -> str:
    """Return a plan's method without those of its drafters that are absent: drafts of the others count as theirs."""
    absent = plan.drafter.absent
    present = [name for name in plan.method.split("+") if name not in absent]
    return "+".join(present) or plan.method


def plans_of(plan: DraftPlan) -> list[DraftPlan]:
    """Return the plans of the drafters that a plan leaves the choice between."""
    choices = plan.drafter.choices
    return [replace(plan, method=name, drafter=drafter) for name, drafter in choices.items()] or [plan]
