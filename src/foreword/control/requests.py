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
from foreword.speculation.confidence import Stop
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
    _limited: DraftPlan | None = None  # the last plan without stop and lag

    def lag(self, length: int) -> int:
        """Return the tokens that it must catch up at this text length; for a head, those with states."""
        missed = max(length - self.observed, 0)
        return missed if self.observing_plan is None else min(missed, KEPT_STATES)

    def planned(self, levels: int, benefit: Benefit | None, stops: bool, lag: int) -> DraftPlan:
        """Return the plan for at most `levels` levels; `stops`: drafts end early where `benefit` expects no gain."""
        stop = None
        if self.is_stopping and benefit is not None:
            rates = self.option.estimate.rates.class_rates(self.fit.shift if stops else 0)
            stop = Stop(rates, benefit.stop if stops else ())
        levels = min(levels, self.plan.max_depth)
        if stop is None and not lag:
            if self._limited is None or self._limited.max_depth != levels:
                self._limited = replace(self.plan, max_depth=levels)
            return self._limited
        return replace(self.plan, max_depth=levels, stop=stop, lag=lag)

    def gains(self, benefit: Benefit) -> bool:
        """Return whether drafting for this request has an expected gain."""
        return self.fit.shift >= benefit.least_shift and benefit.gain > 0

    def keeps_plan(self, benefit: Benefit, drafters: int) -> bool:
        """Return whether its plan does not depend on the acceptance ratio: no stop, and no other drafter to choose."""
        return drafters == 1 and not self.is_stopping and self.gains(benefit)

    def promise(self, benefit: Benefit) -> float:
        """Return the expected gain for this request, comparable between drafters."""
        rates, useful = self.option.estimate.rates, benefit.useful
        usual, own = sum(rates.survival(0)[:useful]), sum(rates.survival(self.fit.shift)[:useful])
        return benefit.gain * own / usual if usual > 0 else benefit.gain

    def useful_levels(self, draft: Draft, chances: Sequence[float], benefit: Benefit) -> int:
        """Return the levels of a draft whose verification has an expected gain; all without confidences."""
        if not draft.confidence or not draft.is_chain:
            return draft.depth
        levels = zip(chances, benefit.least, strict=False)
        return next((level for level, (chance, least) in enumerate(levels) if chance < least), len(draft))

    def own_end(self, chances: Sequence[float], benefit: Benefit) -> int:
        """Return the levels after which the drafter's own stop would have ended a draft that was made without it."""
        levels = enumerate(zip(chances, benefit.stop, strict=False), start=1)
        return next((level for level, (chance, least) in levels if chance < least), len(chances))

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
    verified: int = 0  # levels that are always verified; 0: the useful ones
    stops: bool = True  # whether the drafter ends the draft itself, if it can
    depth: int | None = None  # levels with which the draft counts; None: all
    first: Arm | None = None  # lookup that is called before this drafter
    is_first: bool = False  # whether this is the draft of such a lookup, which replaces the main draft
    draft: Draft = NO_DRAFT  # before trimming
    useful: int = 0  # levels whose verification has an expected gain

    def promised(self, per_token: float) -> float:
        """Return the expected tokens of the draft, less what drafting and verifying it costs."""
        benefit, rates = self.benefit, self.arm.option.estimate.rates
        gains = rates.gains(self.arm.fit.shift)[: benefit.useful]
        rows = sum(
            [often * least for often, least in zip(rates.coverage[: len(gains)], benefit.least, strict=False)]
        )
        return sum(gains) - rows - benefit.draft_seconds * (1 + benefit.gain) / per_token


class ReadyPlan(NamedTuple):
    """A request's plan, reused while the decision and the number of running requests stay the same."""

    decision: object
    running: int
    flight: DraftInFlight
    plan: DraftPlan


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
    ready: ReadyPlan | None = None
    shadows: list[Comparison] = field(default_factory=list)  # waiting for their text

    @property
    def length(self) -> int:
        """Tokens of its text; 0 if it has ended."""
        request = self.request()
        return 0 if request is None else len(request.tokens)

    @cached_property
    def heads(self) -> list[Arm]:
        """Drafters that need the hidden states of the whole prompt."""
        return [arm for arm in self.arms if arm.observing_plan is not None]

    def may_use(self, arm: Arm) -> bool:
        """Return whether a drafter may draft for this request: not a head that missed part of the text.

        Such a head has a lower acceptance than its estimate. It is used only if there is no other drafter.
        """
        return self.has_observed_all or arm.observing_plan is None or len(self.arms) == 1

    def repeated(self, decision: object, running: int, length: int) -> DraftPlan | None:
        """Start a pass with the previous plan and return it; None if another may be better now."""
        ready = self.ready
        if ready is None or ready.decision is not decision or ready.running != running:
            return None
        arm = ready.flight.arm
        if arm.observed < length or not (
            arm.observing_plan is None or (self.was_observed and self.may_use(arm))
        ):
            return None
        flight = self.flight = ready.flight
        flight.draft, flight.useful, self.reader = NO_DRAFT, 0, None
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

    def keep_shadow(self, arm: Arm, levels: int, draft: Draft, useful: int) -> None:
        """Count a shadow draft, and keep it until its text is known."""
        arm.option.estimate.requested(levels, draft.depth, useful)
        if len(draft):
            self.shadows = [*self.shadows[-3:], Comparison(arm.fit, draft, levels, useful)]

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
            useful = lookup.useful_levels(draft, chances, main.benefit)
            more = sum(chances[:useful]) - sum(least[:useful]) - promised
            is_taken = useful > 0 and more > 0
            option.first_gain += DEFAULTS.first_memory * (is_taken * more - option.first_gain)
            if is_taken:
                self.flight = DraftInFlight(lookup, len(draft), benefit, is_first=True)
            return is_taken

        main.first = lookup
        return ShadowDraft(lookup.plan, keep)

    def shadow_beside(self, arm: Arm, levels: int, benefit: Benefit) -> ShadowDraft:
        """Return a shadow draft to request besides the verified one."""

        def keep(draft: Draft) -> None:
            chances = arm.option.estimate.rates.survivals(draft, arm.fit.shift)
            self.keep_shadow(arm, levels, draft, arm.useful_levels(draft, chances, benefit))

        plan = arm.planned(levels, None, False, arm.lag(self.length))
        arm.observed = self.length
        return ShadowDraft(plan, keep)


def present_name(plan: DraftPlan) -> str:
    """Return the names of a plan's drafters, without absent ones: drafts count for the drafters that are present."""
    present = [name for name in plan.method.split("+") if name not in plan.drafter.absent]
    return "+".join(present) or plan.method


def plans_of(plan: DraftPlan) -> list[DraftPlan]:
    """Return the plans of the drafters that a plan offers to choose from."""
    choices = plan.drafter.choices
    return [replace(plan, method=name, drafter=drafter) for name, drafter in choices.items()] or [plan]
