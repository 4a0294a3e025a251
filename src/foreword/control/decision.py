"""A decision for one kind of pass: drafters in use, their depth, and the cost of trying others."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt

from foreword.control.options import Moment, Option
from foreword.control.requests import Arm, RequestState
from foreword.control.settings import DEFAULTS, ControlSettings
from foreword.control.value import (
    Benefit,
    Group,
    Pass,
    best_case,
    best_drafters,
    best_plan,
    worked_levels,
)
from foreword.speculation.measured.situation import Situation

WELL_ABOVE, FAR_ABOVE = 1.05, 1.12
"""Gains over plain decoding above which fewer plain windows are needed."""

CHEAP, LEAST_LOSS, MOST_TRIED = 0.05, 0.01, 8
"""Maximum cost of a lookup call, as fraction of a plain step, for which its levels count as free; minimum
assumed loss of a verified try, in plain tokens per request; maximum requests tried per step."""


@dataclass(frozen=True)
class Candidate:
    """Cost of trying a drafter that is not in use."""

    option: Option
    is_head: bool  # whether it must observe a request before it can be tried
    optimistic: float  # upper estimate of its gain
    levels: int  # depth of a shadow draft
    seconds: float  # expected time of a shadow draft
    more_seconds: float  # expected extra time per further request in the call
    lag_seconds: float  # expected extra time per token to catch up
    live_loss: float  # expected loss in seconds of drafting and verifying for all requests of the cohort
    price: float  # minimum cost of a try: shadow drafts (of several requests if cheap), or a verified try

    @property
    def drafter(self) -> str:
        return self.option.estimate.method

    @property
    def is_live(self) -> bool:
        """Whether tries are verified, because that costs less than shadow drafts."""
        return self.live_loss == self.price


@dataclass(frozen=True)
class Decision:
    """The plan for passes of one kind until the next evaluation."""

    here: Pass
    at: Moment
    benefits: Mapping[Option, Benefit]
    drafters: frozenset[str]  # used together
    in_use: frozenset[Option]
    candidates: Sequence[Candidate]  # highest optimistic gain first
    probe_share: float  # fraction of step time for exploration
    plain_share: float  # fraction of steps for plain windows
    is_settled: bool = False  # whether the estimates of all drafters in use are settled

    @cached_property
    def idle_drafters(self) -> frozenset[str]:
        """Drafters that could be tried for some request."""
        return frozenset(one.drafter for one in self.candidates)

    @cached_property
    def heads_to_try(self) -> list[Candidate]:
        """Candidates that must observe a request before they can be tried."""
        return [one for one in self.candidates if one.is_head]

    def best_arm(self, state: RequestState, running: int) -> Arm | None:
        """Return the drafter with the highest expected gain for the request; None: none has a gain."""
        best, most = None, 0.0
        for arm in state.arms:
            benefit = self.benefits.get(arm.option)
            if benefit is None or arm.option not in self.in_use or not arm.gains(benefit):
                continue
            if arm.plan.allows(running) and state.may_use(arm) and arm.plan.drafter.is_ready:
                promise = arm.promise(benefit) if len(state.arms) > 1 else 1.0
                if promise > most:
                    best, most = arm, promise
        return best

    def lookup_first(self, state: RequestState, running: int) -> Arm | None:
        """Return a lookup whose call before another drafter gains more than it costs; None: there is none."""
        for arm in state.arms:
            benefit = self.benefits.get(arm.option)
            can_draft = arm.is_lookup and state.is_coupled and arm.option.is_cost_known
            if can_draft and benefit is not None and arm.plan.allows(running) and arm.plan.drafter.is_ready:
                seconds = benefit.draft_seconds + DEFAULTS.probe_host_seconds / 8
                if arm.option.first_gain * self.here.per_token > seconds:
                    return arm
        return None

    def uses_head(self, state: RequestState) -> bool:
        """Return whether a head drafts or may soon draft: without observing, it could not draft for this text any more.

        If a new drafter was preferred on its expected gain alone, the head keeps observing until that gain is measured.
        """
        used = [arm.option for arm in state.arms if arm.option in self.in_use]
        for head in state.heads:
            is_wanted = head.option in used or (
                head.option.is_on and any(one.estimate.is_new for one in used)
            )
            if is_wanted and state.may_use(head):
                return True
        return False

    def is_like(self, other: "Decision") -> bool:
        """Return whether another decision uses the same drafters at the same depths."""
        return self._depths() == other._depths()

    def _depths(self) -> dict[Option, tuple[int, int]]:
        return {option: (self.benefits[option].kept, self.benefits[option].depth) for option in self.in_use}


class Evaluation:
    """Evaluates all options of a batch: costs and acceptance → value → on or off → drafters together."""

    def __init__(
        self,
        states: Sequence[RequestState | None],
        here: Pass,
        situation: Situation,
        settings: ControlSettings,
        now: Moment,
    ) -> None:
        self._states = [state for state in states if state is not None]
        self._running = len(states)
        self._here, self._alone = here, here.without_prompts()
        self._costs, self._settings, self._now = situation.costs, settings, now
        self._arms: dict[Option, list[Arm]] = {}
        for state in self._states:
            for arm in state.arms:
                self._arms.setdefault(arm.option, []).append(arm)
        self._groups = {option: self._group(option, arms) for option, arms in self._arms.items()}
        self._least = dict.fromkeys((group.drafter for group in self._groups.values()), 1)
        for option, arms in self._arms.items():
            # A lookup that is cheap at its maximum depth is always requested at full depth, whatever noise says. So
            # the acceptance of deeper levels stays known.
            drafter, group = option.estimate.method, self._groups[option]
            seconds = self._costs.draft_seconds(drafter, group.depth, group.requests)
            if seconds < CHEAP * here.plain and all(arm.is_lookup for arm in arms):
                self._least[drafter] = max(self._least[drafter], group.depth)
        self._known: dict[tuple[str, float, int], float] = {}

    def _group(self, option: Option, arms: Sequence[Arm]) -> Group:
        method = option.estimate.method
        option.estimate.refresh(self._now.seconds)
        option.is_cost_known = self._costs.knows_calls(method)
        depth = min(
            max(min(arm.plan.max_depth, arm.plan.max_nodes) for arm in arms), self._settings.max_depth
        )
        is_stopping = all(arm.is_stopping for arm in arms)
        return Group(option.estimate.rates, len(arms), depth, method, is_stopping=is_stopping)

    def _cost(self, drafter: str, levels: float, requests: int) -> float:
        """Return the expected time of a call; cached."""
        key = (drafter, max(levels, self._least[drafter]), requests)
        if key not in self._known:
            self._known[key] = self._costs.draft_seconds(*key)
        return self._known[key]

    def decide(self, together: frozenset[str]) -> Decision:
        """Return the decision, given the drafters used together at present."""
        here, settings = self._here, self._settings
        benefits: dict[Option, Benefit] = {}
        for drafter in self._least:
            benefits |= self._decide_drafter([o for o in self._arms if o.estimate.method == drafter])
        drafters = self._together(benefits, together)
        used = frozenset(o for o in self._arms if o.is_on and o.estimate.method in drafters)
        idle = [
            option for option in self._arms if option not in used or not self._is_for_all(option, benefits)
        ]
        found = [self._candidate(option, benefits[option]) for option in idle]
        found.sort(key=lambda one: -one.optimistic)
        doubt = max(
            (self._doubt(option, benefits[option]) for option in self._arms if option.is_on), default=0.0
        )
        shares = [self._probe_share(option) for option in idle]
        share = max(shares, default=settings.idle_probe_share)
        is_settled = bool(used) and all(one.is_cost_known and not one.estimate.is_unsettled for one in used)
        plain_share = settings.reference_share * doubt
        return Decision(here, self._now, benefits, drafters, used, found, share, plain_share, is_settled)

    def _decide_drafter(self, options: Sequence[Option]) -> dict[Option, Benefit]:
        """Turn one drafter on or off in each cohort, by its gain if no other drafter is used."""
        here, groups = self._here, [self._groups[option] for option in options]
        found = best_plan(here, groups, self._cost)
        usual = found if self._alone is here else best_plan(self._alone, groups, self._cost)
        if len(groups) == groups[0].requests == 1 and found[0].kept:
            # A single request's own acceptance ratio decides the depth; the cohort's decides on and off.
            shift = self._arms[options[0]][0].fit.shift
            own = best_plan(here, [replace(groups[0], shift=shift)], self._cost)[0] if shift else found[0]
            found = [replace(found[0], depth=own.depth, kept=own.kept)] if own.kept else found
        for option, benefit, as_usual in zip(options, found, usual, strict=True):
            option.decide(benefit, as_usual.gain, self._settings, self._now)
        return dict(zip(options, found, strict=True))

    def _together(self, benefits: Mapping[Option, Benefit], together: frozenset[str]) -> frozenset[str]:
        """Return the drafters to use together: another drafter's call may have no benefit next to the others."""
        options = [tuple(arm.option for arm in state.arms if arm.option.is_on) for state in self._states]
        cohorts = [
            [
                replace(self._groups[o], requests=count, depth=benefits[o].kept)
                for o in some
                if benefits[o].kept
            ]
            for some, count in Counter(options).items()
        ]
        margin = self._settings.margin_on / 2
        return best_drafters(self._here, [some for some in cohorts if some], together, self._cost, margin)

    def _is_for_all(self, option: Option, benefits: Mapping[Option, Benefit]) -> bool:
        """Return whether an option in use applies to all its requests, at every acceptance ratio."""
        return all(
            arm.gains(benefits[option]) and arm.plan.allows(self._running) for arm in self._arms[option]
        )

    def _candidate(self, option: Option, benefit: Benefit) -> Candidate:
        """Return the costs of trying an option; an unmeasured call is assumed to cost as much as a pass."""
        here, group, settings = self._here, self._groups[option], self._settings
        drafter, depth, requests = group.drafter, group.depth, group.requests
        has_levels = self._cost(drafter, depth, 1) - self._cost(drafter, 1, 1) > 0.01 * here.plain
        is_deep = option.is_cost_known and not has_levels
        levels = depth if is_deep else min(depth, settings.probe_levels)
        loss = inf
        if option.is_cost_known and benefit.kept and self._now.seconds >= option.guard.off_until:
            gained = requests * sum(group.rates.gains(0)[: benefit.kept]) * here.per_token
            longer = here.after(requests * sum(group.rates.coverage[: benefit.kept])) - here.plain
            longer += self._cost(drafter, worked_levels([group], benefit.depth), requests)
            loss = max(longer - gained, 0.0) + LEAST_LOSS * requests * here.per_token
        seconds, several = self._cost(drafter, levels, 1) or here.plain, min(requests, MOST_TRIED)
        host = settings.probe_host_seconds
        together = self._cost(drafter, levels, several) + several * host / 4
        # Trying a lookup costs mostly host time, which is the same for several requests.
        price = together if seconds < together <= 4 * host else seconds
        # With few observations, use the best case: always a draft, always accepted.
        doubt = sqrt(settings.cohort_drafts / (settings.cohort_drafts + option.estimate.counts.requests))
        best = max(best_case(self._alone, group, self._cost) - benefit.gain, 0.0)
        return Candidate(
            option,
            self._arms[option][0].observing_plan is not None,
            benefit.gain + doubt * best,
            levels,
            seconds,
            self._cost(drafter, levels, 2) - self._cost(drafter, levels, 1),
            self._costs.lag_seconds(drafter),
            loss,
            min(price, loss),
        )

    def _probe_share(self, option: Option) -> float:
        """Return the fraction of time for exploring an option; small for a new cohort of a known drafter."""
        settings = self._settings
        if best_case(self._alone, self._groups[option], self._cost) < settings.margin_on:
            return settings.idle_probe_share
        is_unknown = not option.is_cost_known or option.estimate.is_unknown
        is_near = option.usual_gain >= settings.hopeless
        if is_unknown and is_near:
            return settings.probe_share
        return settings.watch_share if is_unknown or is_near else settings.idle_probe_share

    def _doubt(self, option: Option, benefit: Benefit) -> float:
        """Return the fraction of plain windows that it needs: few if expected and measured gain agree."""
        expected, measured = 1 + benefit.gain, option.guard.gain.bounds()
        least = expected if measured is None else min(expected, measured[0])
        if least < WELL_ABOVE or not option.is_cost_known:
            return 1.0
        return self._settings.sure_reference if measured is not None and least >= FAR_ABOVE else 0.5
