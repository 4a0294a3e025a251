"""Policy state of a request: its possible drafters, and which of them drafts, observes or is tried."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from foreword.control.judging import Comparison, RequestFit
from foreword.control.options import Option
from foreword.control.settings import DEFAULTS
from foreword.control.value import Benefit
from foreword.kv.extra_rows import KEPT_STATES
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.requests import DraftPlan, ShadowDraft, StepRequest


@dataclass(eq=False)
class Arm:
    """One drafter for one request."""

    plan: DraftPlan  # upper limits
    option: Option
    fit: RequestFit
    is_stopping: bool = False  # whether its drafts end where continuing has no benefit
    observed: int = 0  # tokens of the text that the drafter has observed or drafted after
    _planned: tuple[tuple[Benefit | None, int, int | None], DraftPlan] | None = None

    def lag(self, length: int) -> int:
        """Return the tokens that it must catch up at this text length; for a head, those with states."""
        missed = max(length - self.observed, 0)
        return missed if self.observing_plan is None else min(missed, KEPT_STATES)

    def planned(self, levels: int, benefit: Benefit | None, stops: bool, lag: int) -> DraftPlan:
        """Return the plan for at most `levels` levels; `stops`: drafts end early where `benefit` expects no gain."""
        levels, shift = min(levels, self.plan.max_depth), self.fit.shift if stops else None
        key = (benefit, levels, shift)
        if self._planned is None or self._planned[0] != key:
            has_stop = self.is_stopping and benefit is not None
            stop = self.option.stop(benefit, shift) if has_stop and benefit is not None else None
            is_same = levels == self.plan.max_depth and stop is None
            self._planned = key, self.plan if is_same else replace(self.plan, max_depth=levels, stop=stop)
        plan = self._planned[1]
        return replace(plan, lag=lag) if lag > 0 else plan

    def gains(self, benefit: Benefit) -> bool:
        """Return whether drafting for this request has an expected gain."""
        return self.fit.shift >= benefit.least_shift and benefit.gain > 0

    def keeps_plan(self, benefit: Benefit, drafters: int) -> bool:
        """Return whether its plan does not depend on the acceptance ratio: no stop, and no other drafter to choose."""
        return drafters == 1 and not self.is_stopping and self.gains(benefit)

    def promise(self, benefit: Benefit) -> float:
        """Return the expected gain for this request, comparable between drafters."""
        rates, kept = self.option.estimate.rates, benefit.kept
        usual, own = sum(rates.survival(0)[:kept]), sum(rates.survival(self.fit.shift)[:kept])
        return benefit.gain * own / usual if usual > 0 else benefit.gain

    def levels_with_benefit(self, draft: Draft, chances: Sequence[float], benefit: Benefit) -> int:
        """Return the levels of a draft with a net benefit; all without confidences."""
        if not draft.confidence or not draft.is_chain:
            return draft.depth
        for level, (chance, least) in enumerate(zip(chances, benefit.least, strict=False)):
            if chance < least:
                return level
        return len(draft)

    @cached_property
    def observing_plan(self) -> DraftPlan | None:
        """The plan with which a head observes a pass without drafting; None: it is not a head."""
        has_states = bool(self.plan.drafter.traits.needs.taps)
        return replace(self.plan, max_nodes=0, max_depth=0) if has_states else None

    @cached_property
    def is_lookup(self) -> bool:
        """Whether it needs only tokens."""
        return not self.plan.drafter.traits.needs


@dataclass(slots=True)
class DraftInFlight:
    """A draft request of the pass in flight."""

    arm: Arm
    levels: int  # requested levels
    benefit: Benefit
    is_shadow: bool = False  # only compared with the text
    paid: float = 0.0  # seconds paid for a shadow draft
    verified: int = 0  # levels that are always verified; 0: those with a net benefit
    first: Arm | None = None  # lookup that is called before this drafter
    is_first: bool = False  # whether this is the draft of such a lookup, which replaces the main draft
    draft: Draft = NO_DRAFT  # before trimming
    kept: int = 0  # levels with a net benefit

    def promised(self, per_token: float) -> float:
        """Return the expected tokens of the draft, less what drafting and verifying it costs."""
        benefit, rates = self.benefit, self.arm.option.estimate.rates
        gains = rates.gains(self.arm.fit.shift)[: benefit.kept]
        rows = sum(
            [often * least for often, least in zip(rates.coverage, benefit.least[: len(gains)], strict=False)]
        )
        return sum(gains) - rows - benefit.draft_seconds * (1 + benefit.gain) / per_token


class ReadyDraft(NamedTuple):
    """A request's plan, reused while nothing changes."""

    decision: object
    running: int  # requests in the pass
    flight: DraftInFlight
    plan: DraftPlan

    def holds(self, state: "RequestState", decision: object, running: int, length: int) -> bool:
        """Return whether the plan is still the best: the decision is the same, and the drafter observed every step."""
        arm = self.flight.arm
        return (
            self.decision is decision
            and self.running == running
            and arm.observed >= length
            and state.can_draft(arm)
        )


@dataclass(eq=False)
class RequestState:
    """Policy state of a running request."""

    method: str  # of its initial plan
    arms: list[Arm]
    is_coupled: bool  # whether a draft token is accepted exactly if it equals the next token
    request: Callable[[], StepRequest | None]  # None: ended
    is_observed: bool = False  # whether heads observe the pass in flight
    was_observed: bool = False  # whether they observed the previous pass
    has_observed_all: bool = True  # whether heads have observed all passes of the text
    reader: Arm | None = None  # the head that observes the pass in flight without drafting
    flight: DraftInFlight | None = None
    ready: ReadyDraft | None = None
    shadows: list[Comparison] = field(default_factory=list)  # waiting for their text

    @cached_property
    def heads(self) -> list[Arm]:
        """Drafters that need the hidden states of the whole prompt."""
        return [arm for arm in self.arms if arm.observing_plan is not None]

    def may_use(self, arm: Arm) -> bool:
        """Return whether a drafter may draft for this request: not a head that missed part of the text.

        Such a head has a lower acceptance than its estimate. It is used only if there is no other drafter.
        """
        return self.has_observed_all or arm.observing_plan is None or len(self.arms) == 1

    def can_draft(self, arm: Arm) -> bool:
        """Return whether a drafter has observed the newest token, and enough of the text."""
        return arm.observing_plan is None or (self.was_observed and self.may_use(arm))

    def repeat(self, ready: "ReadyDraft") -> DraftPlan:
        """Start a pass with the previous plan."""
        flight = self.flight = ready.flight
        flight.draft, flight.kept, self.reader = NO_DRAFT, 0, None
        return ready.plan

    def observe(self, head: Arm | None) -> DraftPlan | None:
        """Let this head observe the pass without drafting; return its plan."""
        self.reader, self.is_observed = head, head is not None
        return None if head is None else head.observing_plan

    def waits_for(self, arm: Arm) -> bool:
        """Return whether its last shadow draft is not judged yet, because the text is too short.

        Tries do not overlap, as verified drafts do not. Otherwise a drafter that is often right would be called more
        often, and its coverage would be overestimated.
        """
        return any(shadow.fit is arm.fit for shadow in self.shadows)

    def keep_shadow(self, arm: Arm, levels: int, draft: Draft, kept: int) -> None:
        """Count a shadow draft, and keep it until its text is known."""
        arm.option.estimate.requested(levels, draft.depth, kept)
        if len(draft):
            self.shadows = [*self.shadows[-3:], Comparison(arm.fit, draft, levels, kept)]

    def lookup_first(
        self, lookup: Arm, benefit: Benefit, main: DraftInFlight, per_token: float
    ) -> ShadowDraft:
        """Return a draft request to a lookup before the main drafter. The better draft is verified.

        `per_token` is the plain time of a token in seconds. A lookup's draft is taken if its confidence promises more
        than the main draft. Such drafts count by confidence alone, since they were selected by it.
        """
        option, least, promised = lookup.option, main.benefit.least, main.promised(per_token)

        def keep(draft: Draft) -> bool:
            chances = option.estimate.rates.survivals(draft, lookup.fit.shift)
            kept = lookup.levels_with_benefit(draft, chances, main.benefit)
            more = sum(chances[:kept]) - sum(least[:kept]) - promised
            is_taken = kept > 0 and more > 0
            option.first_gain += DEFAULTS.first_memory * (is_taken * more - option.first_gain)
            if is_taken:
                self.flight = DraftInFlight(lookup, len(draft), benefit, is_first=True)
            return is_taken

        main.first = lookup
        return ShadowDraft(lookup.plan, keep)

    def shadow_beside(self, arm: Arm, levels: int, benefit: Benefit, length: int) -> ShadowDraft:
        """Return a shadow draft to request besides the verified one."""

        def keep(draft: Draft) -> None:
            chances = arm.option.estimate.rates.survivals(draft, arm.fit.shift)
            self.keep_shadow(arm, levels, draft, arm.levels_with_benefit(draft, chances, benefit))

        plan = arm.planned(levels, None, False, arm.lag(length))
        arm.observed = length
        return ShadowDraft(plan, keep)


def present_name(plan: DraftPlan) -> str:
    """Return the names of a plan's drafters, without absent ones: drafts count for the drafters that are present."""
    absent = plan.drafter.absent
    present = [name for name in plan.method.split("+") if name not in absent]
    return "+".join(present) or plan.method


def plans_of(plan: DraftPlan) -> list[DraftPlan]:
    """Return the plans of the drafters that a plan offers to choose from."""
    choices = plan.drafter.choices
    return [replace(plan, method=name, drafter=drafter) for name, drafter in choices.items()] or [plan]
