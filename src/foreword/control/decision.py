"""Decisions: the drafters in use, their depths and the costs of trying others, until the next evaluation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt

from foreword.control.options import Moment, Option
from foreword.control.requests import Arm, RequestState
from foreword.control.settings import ControlSettings
from foreword.control.value import Benefit, Group, Pass, best_case, best_drafters, best_plan, replaces
from foreword.kv.extra_rows import KEPT_STATES
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StageSeconds

MOST_KINDS, LEAST_TABLE = 32, 64
"""Number of cached decisions; minimum rows for which costs are read at once."""


@dataclass(frozen=True)
class Candidate:
    """Cost of trying a drafter that is not in use."""

    option: Option
    is_head: bool  # whether it must observe a request before it can be tried
    levels: int  # depth of a shadow draft
    seconds: float  # expected time of a shadow draft
    more_seconds: float  # expected extra time per further request in the call
    lag_seconds: float  # expected extra time per token to catch up
    price: float  # expected time of a try: shadow drafts, of several requests if they are cheap

    @property
    def drafter(self) -> str:
        return self.option.estimate.method

    @property
    def catch_up(self) -> float:
        """Expected extra time of a head that missed as many tokens as there are states of."""
        return self.lag_seconds * KEPT_STATES


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

    @cached_property
    def levels(self) -> dict[Option, tuple[int, int]]:
        """Useful and requested levels of the options in use."""
        return {option: (self.benefits[option].useful, self.benefits[option].depth) for option in self.in_use}

    def best_arm(self, state: RequestState, running: int) -> Arm | None:
        """Return the drafter with the highest expected gain for the request; None: none has a gain."""
        best, highest = None, 0.0
        for arm in state.arms:
            benefit = self.benefits.get(arm.option)
            if benefit is None or arm.option not in self.in_use or not arm.gains(benefit):
                continue
            if arm.plan.allows(running) and state.may_use(arm) and arm.plan.drafter.is_ready:
                promise = arm.promise(benefit) if len(state.arms) > 1 else 1.0
                if promise > highest:
                    best, highest = arm, promise
        return best

    def lookup_first(self, state: RequestState, running: int) -> Arm | None:
        """Return a lookup whose call before another drafter gains more than it costs; None: there is none."""
        for arm in state.arms:
            benefit = self.benefits.get(arm.option)
            can_draft = arm.is_lookup and state.is_coupled and arm.option.is_cost_known
            if benefit is None or not (can_draft and arm.plan.allows(running) and arm.plan.drafter.is_ready):
                continue
            if arm.option.gains_first(benefit.draft_seconds, self.here.per_token):
                return arm
        return None

    def uses_head(self, state: RequestState) -> bool:
        """Return whether a head drafts or may soon draft: without observing, it could not draft for this text any more.

        If a new drafter was preferred on its expected gain alone, the head keeps observing until that gain is measured.
        It also observes passes with prompts, which say nothing about later ones.
        """
        used = [arm.option for arm in state.arms if arm.option in self.in_use]
        is_open = self.here.prompts > 0 or any(one.estimate.is_new for one in used)
        return any(
            (head.option in used or (head.option.is_on and is_open)) and state.may_use(head)
            for head in state.heads
        )


class Decisions:
    """Cached decisions by kind of pass: most steps resemble an earlier one and reuse its decision."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.newest: Decision | None = None
        # [rows] expected step seconds by context band, since an evaluation
        self._tables: dict[int, list[float]] = {}
        self._here: Pass | None = None  # the last pass
        self._known: dict[tuple[int, int], Decision] = {}  # by kind: passes with and without prompts
        self._wait = settings.decision_steps
        self._slow_calls = 0  # consecutive steps with slow calls
        self._soon = 0  # remaining evaluations after few steps, since calls have become slow

    def pass_of(self, drawn: int, rows: int, nodes: int, context: int, situation: Situation) -> Pass | None:
        """Return the pass without drafts, to which `nodes` rows may be added; None before any step was measured."""
        band, needed = situation.costs.band(context), rows + nodes
        table = self._tables.get(band, [])
        if needed >= len(table) or len(table) > max(8 * needed, 4 * LEAST_TABLE):
            table = situation.costs.step_table(max(2 * needed, LEAST_TABLE), context) or []
            self._tables[band] = table
        here = self._here
        if here is None or here.drawn != drawn or here.rows != rows or here.seconds is not table:
            here = self._here = Pass.of(drawn, rows, table) if table and drawn else None
        return here

    def find(self, here: Pass, now: Moment) -> Decision | None:
        """Return the decision for this kind of pass; None: it is time for an evaluation, by the newest costs."""
        known = self._known.get(here.kind)
        if known is not None:
            longest = self.settings.decision_seconds * (1 + known.is_settled)
            if now.step - known.at.step < self._wait and now.seconds - known.at.seconds < longest:
                self.newest = known
                return known
        self._tables.clear()
        return None

    def decide(
        self, here: Pass, states: Sequence[RequestState | None], situation: Situation, now: Moment
    ) -> Decision:
        """Evaluate all options for this kind of pass."""
        kind, used = here.kind, frozenset() if self.newest is None else self.newest.drafters
        found = Evaluation(states, here, situation, self.settings, now).decide(used)
        before, usual = self._known.get(kind), self.settings.decision_steps
        if not all(option.is_cost_known for option in found.in_use):
            self._wait = 2
        elif self._soon or any(option.estimate.is_new for option in found.in_use):
            self._soon, self._wait = max(self._soon - 1, 0), self.settings.new_steps
        elif (found.is_settled or not found.in_use) and before is not None and before.levels == found.levels:
            self._wait = min(max(2 * self._wait, usual), 4 * usual)
        else:
            self._wait = usual // 2
        if len(self._known) >= MOST_KINDS:
            self._known.clear()
        self.newest = self._known[kind] = found
        return found

    def evaluate_again(self) -> None:
        """Evaluate everything in the next step."""
        self._known.clear()

    def note_calls(self, seconds: StageSeconds, expected: float) -> None:
        """Evaluate again if calls have become far slower than expected, in several steps in a row."""
        is_slow = seconds.draft + seconds.observe - expected > self.settings.slow_call * seconds.total
        self._slow_calls = self._slow_calls + 1 if is_slow else 0
        if self._slow_calls == 4:
            self._slow_calls, self._soon = 0, 16
            self._known.clear()


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
        for option, group in self._groups.items():
            # A lookup that is cheap at its maximum depth is always requested at full depth, whatever noise says. So
            # the acceptance of deeper levels stays known.
            seconds = self._costs.draft_seconds(group.drafter, group.depth, group.requests)
            if seconds < settings.cheap_call * here.plain and all(
                arm.is_lookup for arm in self._arms[option]
            ):
                self._least[group.drafter] = max(self._least[group.drafter], group.depth)
        self._known: dict[tuple[str, float, int], float] = {}
        self._called_first: frozenset[Option] = (
            frozenset()
        )  # lookups left out, since they go before another drafter

    def _group(self, option: Option, arms: Sequence[Arm]) -> Group:
        option.estimate.refresh(self._now.seconds)
        option.is_cost_known = self._costs.knows_calls(option.estimate.method)
        depth = max(min(arm.plan.max_depth, arm.plan.max_nodes) for arm in arms)
        is_stopping = all(arm.is_stopping for arm in arms)
        depth = min(depth, self._settings.max_depth)
        return Group(option.estimate.rates, len(arms), depth, option.estimate.method, is_stopping=is_stopping)

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
        on = [option for option in self._arms if option.is_on and option not in self._called_first]
        used = frozenset(option for option in on if option.estimate.method in drafters)
        idle = [one for one in self._arms if one not in used or not self._is_for_all(one, benefits[one])]
        idle.sort(key=lambda one: -self._optimistic(one, benefits[one]))
        share = max(map(self._probe_share, idle), default=settings.idle_probe_share)
        doubts = [self._doubt(option, benefits[option]) for option in self._arms if option.is_on]
        plain_share = settings.reference_share * max(doubts, default=0.0)
        is_settled = bool(used) and all(one.is_cost_known and not one.estimate.is_unsettled for one in used)
        candidates = [self._candidate(option) for option in idle]
        return Decision(here, self._now, benefits, drafters, used, candidates, share, plain_share, is_settled)

    def _decide_drafter(self, options: Sequence[Option]) -> dict[Option, Benefit]:
        """Turn one drafter on or off in each cohort, by its gain if no other drafter is used."""
        here, groups = self._here, [self._groups[option] for option in options]
        found = best_plan(here, groups, self._cost)
        usual = found if self._alone is here else best_plan(self._alone, groups, self._cost)
        if len(groups) == groups[0].requests == 1 and found[0].useful:
            # A single request's own acceptance ratio decides the depth; the cohort's decides on and off.
            shift = self._arms[options[0]][0].fit.shift
            own = best_plan(here, [replace(groups[0], shift=shift)], self._cost)[0] if shift else found[0]
            found = [replace(found[0], depth=own.depth, useful=own.useful)] if own.useful else found
        for option, benefit, as_usual in zip(options, found, usual, strict=True):
            option.decide(benefit, as_usual.gain, self._settings, self._now)
        return dict(zip(options, found, strict=True))

    def _together(self, benefits: Mapping[Option, Benefit], in_use: frozenset[str]) -> frozenset[str]:
        """Return the drafters to use together: another drafter's call may have no benefit next to the others."""
        alike = Counter(tuple(arm.option for arm in state.arms if arm.option.is_on) for state in self._states)
        cohorts = [
            {
                one: replace(self._groups[one], requests=count, depth=benefits[one].useful)
                for one in options
                if benefits[one].useful
            }
            for options, count in alike.items()
        ]
        rivals = [self._rivals(groups, benefits) for groups in cohorts]
        self._called_first = frozenset[Option]().union(*cohorts).difference(*rivals)
        in_cohorts = [list(groups.values()) for groups in rivals]
        return best_drafters(self._here, in_cohorts, in_use, self._cost, self._settings.margin_on / 2)

    def _rivals(
        self, groups: Mapping[Option, Group], benefits: Mapping[Option, Benefit]
    ) -> dict[Option, Group]:
        """Return the groups of which one is used, without lookups that gain more when called before another drafter.

        A head replaced by such a lookup would not observe the text, and so could not return.
        """
        lookups = [option for option in groups if self._goes_first(option, benefits[option])]
        others = [group for option, group in groups.items() if option not in lookups]
        alone = [o for o in lookups if all(replaces(self._here, groups[o], g, self._cost) for g in others)]
        return {o: group for o, group in groups.items() if o not in lookups or o in alone}

    def _goes_first(self, option: Option, benefit: Benefit) -> bool:
        """Return whether an option is a lookup that is called before other drafters."""
        arms = self._arms[option]
        return (
            option.is_cost_known
            and option.gains_first(benefit.draft_seconds, self._here.per_token)
            and all(state.is_coupled for state in self._states)
            and all(arm.is_lookup and arm.plan.allows(self._running) for arm in arms)
        )

    def _is_for_all(self, option: Option, benefit: Benefit) -> bool:
        """Return whether an option in use applies to all its requests, at every acceptance ratio."""
        return all(arm.gains(benefit) and arm.plan.allows(self._running) for arm in self._arms[option])

    def _optimistic(self, option: Option, benefit: Benefit) -> float:
        """Return an upper estimate of the gain: with few observations, always a draft and always accepted."""
        least = self._settings.cohort_drafts
        doubt = sqrt(least / (least + option.estimate.counts.requests))
        best = best_case(self._alone, self._groups[option], self._cost)
        return benefit.gain + doubt * max(best - benefit.gain, 0.0)

    def _candidate(self, option: Option) -> Candidate:
        """Return the cost of trying an option; an unmeasured call is assumed to cost as much as a pass."""
        group, settings, plain = self._groups[option], self._settings, self._here.plain
        drafter, depth, host = group.drafter, group.depth, settings.probe_host_seconds
        levels_seconds = self._cost(drafter, depth, 1) - self._cost(drafter, 1, 1)
        has_levels = levels_seconds > settings.negligible_time * plain
        is_deep = option.is_cost_known and not has_levels
        levels = depth if is_deep else min(depth, settings.probe_levels)
        seconds = self._cost(drafter, levels, 1) or plain
        several = min(group.requests, settings.probe_requests)
        # Trying a lookup costs mostly host time, which is the same for several requests.
        together = self._cost(drafter, levels, several) + several * host / 4
        return Candidate(
            option,
            self._arms[option][0].observing_plan is not None,
            levels,
            seconds,
            self._cost(drafter, levels, 2) - self._cost(drafter, levels, 1),
            self._costs.lag_seconds(drafter),
            together if seconds < together <= 4 * host else seconds,
        )

    def _probe_share(self, option: Option) -> float:
        """Return the fraction of time for exploring an option; small for a new cohort of a known drafter."""
        settings = self._settings
        if best_case(self._alone, self._groups[option], self._cost) < settings.margin_on:
            return settings.idle_probe_share
        is_unknown = not option.is_cost_known or option.estimate.is_unknown
        if option.usual_gain < (settings.hopeless if is_unknown else -settings.margin_on):
            return settings.idle_probe_share
        return settings.probe_share if is_unknown else settings.near_probe_share

    def _doubt(self, option: Option, benefit: Benefit) -> float:
        """Return the fraction of plain windows that it needs: few if the expected and the measured gain are high."""
        settings, measured = self._settings, option.guard.gain.bounds()
        if benefit.gain < settings.sure_gain or not option.is_cost_known:
            return 1.0
        if measured is None:
            return 0.5
        return settings.sure_reference if measured[0] - 1 >= settings.sure_gain else 1.0
