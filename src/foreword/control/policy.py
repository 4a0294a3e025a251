"""The default policy: drafts if measured costs and acceptance predict a gain."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from weakref import ref

from foreword.acceptance.rules.rule import Rule
from foreword.control.acceptance import HEAD_COVERAGE, PRIOR_COVERAGE, Estimate, Estimates
from foreword.control.decision import Decision, Decisions
from foreword.control.explore import Explorer
from foreword.control.fixed import fixed_plan
from foreword.control.guard import ReferenceWindows
from foreword.control.judging import Comparison, RequestFit
from foreword.control.options import Moment, Option
from foreword.control.requests import Arm, DraftInFlight, ReadyPlan, RequestState, plans_of, present_name
from foreword.control.settings import ControlSettings
from foreword.control.trim import trimmed
from foreword.control.value import Pass
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftSource
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import RequestReport, StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest

FEW_STATES = 64
"""Request states kept before those of ended requests are dropped."""


class MeasuredPolicy:
    """Drafts if that raises the batch's expected tokens per second.

    A request's plan is an upper limit; a fixed plan is used as it is.
    """

    def __init__(self, settings: ControlSettings | None = None, estimates: Estimates | None = None) -> None:
        self.settings = settings or ControlSettings()
        self.estimates = estimates or Estimates()
        self.explorer = Explorer(self.settings)
        self.reference = ReferenceWindows()
        self.decisions = Decisions(self.settings)
        self.options: dict[Estimate, Option] = {}
        self.here: Pass | None = None  # the last pass without its drafts
        self.steps = 0
        self.seconds = 0.0  # total step time
        self._states: dict[int, RequestState] = {}  # by request id
        self._most_states = FEW_STATES
        self._can_explore = False  # whether the pass has requests for which drafters can be tried
        self._most_nodes = 0  # of the requests' plans

    @property
    def measured(self) -> "MeasuredPolicy":
        """The policy whose estimates and decisions are reported."""
        return self

    @property
    def decision(self) -> Decision | None:
        """The current decision; None before the first."""
        return self.decisions.newest

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> Sequence[DraftPlan | None]:
        """Return the drafter and the depth for each request.

        1. `Decisions` decides every few steps which drafters are in use and how deep.
        2. In the guard's plain windows (`ReferenceWindows`) no request drafts.
        3. A request with a fixed plan uses it; one in prefill has a head observe its prompt.
        4. Each other request repeats its plan, or gets the drafter with its highest expected gain (`_draft`).
        5. The explorer requests shadow drafts of other drafters within its budget.
        """
        states, running = [self._state(entry.request) for entry in entries], len(entries)
        self._can_explore = any(states)
        if not self._can_explore:
            return [fixed_plan(entry.request, running) for entry in entries]
        drawn, rows = sum([entry.draws for entry in entries]), sum([entry.run for entry in entries])
        drafting = states
        if rows > running or drawn < running:
            drafting = [
                state if state is not None and entry.draws and (entry.run == 1 or not state.heads) else None
                for state, entry in zip(states, entries, strict=True)
            ]
        self._decide(drafting, drawn, rows, sum([entry.computed for entry in entries]) // running, situation)
        decision = self.decision
        is_plain = decision is None or self.here is None or self.reference.begin_step(decision.plain_share)
        if decision is not None and (decision.heads_to_try or self.explorer.watched is not None):
            self.explorer.watch(states, decision, self.steps)
        plans: list[DraftPlan | None] = []
        is_usual = not is_plain and self.steps % self.settings.trial_steps > 0
        for entry, state, may_draft in zip(entries, states, drafting, strict=True):
            if state is None:
                plans.append(fixed_plan(entry.request, running))
            elif may_draft is None or decision is None:
                plans.append(self._plan_prefill(state))
            elif not decision.in_use:
                state.flight, state.reader, state.is_observed = None, None, state is self.explorer.watched
                plans.append(None)
            else:
                length = len(entry.request.tokens)
                plan = (
                    state.repeated(decision, running, length)
                    if is_usual and state.ready is not None
                    else None
                )
                if plan is None:
                    arm = None if is_plain else decision.best_arm(state, running)
                    plan = self._draft(state, arm, decision, running, length)
                plans.append(plan)
        if not is_plain and decision is not None and decision.candidates:
            self.explorer.explore(decision, drafting, plans, self.steps)
        return plans

    def _decide(
        self,
        states: Sequence[RequestState | None],
        drawn: int,
        rows: int,
        context: int,
        situation: Situation,
    ) -> None:
        """Describe the pass, and decide for passes of its kind if that is due."""
        nodes, now = len(states) * self._most_nodes, Moment(self.steps, self.seconds, self.reference.passes)
        self.here = here = self.decisions.pass_of(drawn, rows, nodes, context, situation)
        if here is not None and any(states) and self.decisions.find(here, now) is None:
            self.here = here = self.decisions.pass_of(drawn, rows, nodes, context, situation) or here
            self.decisions.decide(here, states, situation, now)

    def _draft(
        self, state: RequestState, arm: Arm | None, decision: Decision, running: int, length: int
    ) -> DraftPlan | None:
        """Return the plan of a request with this drafter (None: without), and record it as in flight."""
        state.flight = state.reader = state.ready = None
        if state.heads:
            state.is_observed = state is self.explorer.watched or decision.uses_head(state)
        if arm is None:
            return None
        if arm.observing_plan is not None and not state.was_observed:
            return state.observe(arm)  # it has not observed the newest token
        benefit, trials = decision.benefits[arm.option], self.settings.trial_steps
        levels = benefit.depth if state.is_coupled else benefit.useful
        verified, stops, is_steady = 0, True, arm.option.is_cost_known and self.steps % trials > 0
        if not arm.option.is_cost_known:  # vary the depth until the cost per level is known
            levels = max(levels >> (self.steps % 3), 1)
        elif not is_steady:
            # Alternate one level more or less, since cost and acceptance may be wrong.
            stops = not arm.is_stopping
            levels = levels if stops else min(levels, self.settings.probe_levels)
            other = benefit.useful + (1 if self.steps // trials % 2 else -1)
            if stops and 1 <= other <= min(arm.plan.max_depth, arm.plan.max_nodes):
                levels, verified = max(levels, other) if state.is_coupled else other, other
        flight = state.flight = DraftInFlight(arm, levels, benefit, verified=verified, stops=stops)
        plan = arm.planned(levels, benefit, stops, arm.lag(length))
        lookup = None if verified or arm.is_lookup else decision.lookup_first(state, running)
        if lookup is not None:
            first, per_token = decision.benefits[lookup.option], decision.here.per_token
            plan = replace(plan, shadow=state.lookup_first(lookup, first, flight, per_token))
        can_repeat = arm.observing_plan is not None or not state.heads
        if is_steady and can_repeat and not plan.lag and not plan.gates:
            state.ready = ReadyPlan(decision, running, flight, plan)
        return plan

    def _plan_prefill(self, state: RequestState) -> DraftPlan | None:
        """Return the plan of a prefill pass, which a head observes if it may draft afterwards."""
        state.flight, is_watched, decision = None, state is self.explorer.watched, self.decision
        # An option that is on but left out by the newest decision has no benefit next to the others.
        unused = frozenset[Option]() if decision is None else frozenset(decision.benefits) - decision.in_use
        heads = [
            head
            for head in state.heads
            if is_watched
            or (head.option.may_be_used(self.settings) and not (head.option.is_on and head.option in unused))
        ]
        return state.observe(max(heads, key=lambda arm: arm.option.benefit.gain, default=None))

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> Sequence[Draft]:
        """Return the nodes that maximise the batch's tokens per second."""
        return trimmed(entries, drafts, self._states, self.here)

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation, beside: int = 1) -> int:
        """Return the draft tokens with an expected gain for these requests."""
        running, rows, decision = len(requests) + beside, 0, self.decision
        for request in requests:
            state, plan = self._states.get(request.request_id), request.speculation
            if plan is not None and plan.is_fixed:
                rows += plan.max_nodes
            elif state is not None and decision is not None:
                arm = decision.best_arm(state, running)
                rows += 0 if arm is None else min(decision.benefits[arm.option].useful, arm.plan.max_nodes)
        return rows

    def learn(self, report: StepReport) -> None:
        """Compare drafts with the text, and the step's time with a plain step."""
        self.steps += 1
        self.seconds += report.seconds.total
        here, decision = self.here, self.decision
        if decision is not None and here is not None and self._can_explore and here.rows == here.drawn:
            # The budget grows in decode-only steps with requests for which drafters could be tried.
            self.explorer.earn(report.seconds.total, decision.probe_share, decision.idle_drafters)
            self.explorer.pay_observing()
        used: dict[Option, None] = {}  # a set in the order of requests
        is_settled = decision is not None and decision.is_settled
        every = max(-(-len(report.with_drafts) // self.settings.judged_drafts), 1) * (2 if is_settled else 1)
        for part in report.requests:
            number = part.request.request_id
            state = self._states.get(number)
            if state is not None and (state.flight or state.reader or state.shadows):
                self._compare_drafts(state, part, used, (number + self.steps) % every == 0)
        self._measure(report, used)

    def _compare_drafts(
        self, state: RequestState, part: RequestReport, used: dict[Option, None], is_judged: bool
    ) -> None:
        """Compare a request's drafts with its text."""
        flight, reader, tokens = state.flight, state.reader, part.request.tokens
        if state.shadows:
            state.shadows = [one for one in state.shadows if part.applied and not one.follow(tokens)]
            state.ready = None  # the acceptance ratio may have changed
        state.flight = state.reader = None
        if reader is not None:
            reader.observed = len(tokens)
        if flight is None or part.called != flight.arm.plan.method:
            return
        flight.arm.observed = len(tokens)
        if flight.first is not None:
            flight.first.observed = len(tokens)
        if flight.is_shadow:
            # Charge the actual time, clipped in case of a pause.
            self.explorer.pay(part.called, min(part.draft_seconds, 4 * flight.paid) - flight.paid)
            state.keep_shadow(flight.arm, flight.levels, flight.draft, flight.useful)
            state.shadows, state.ready = [one for one in state.shadows if not one.follow(tokens)], None
            return
        if not flight.is_first:
            used[flight.arm.option] = None
        if is_judged or flight.is_first:
            self._judge(state, flight, part)

    def _judge(self, state: RequestState, flight: DraftInFlight, part: RequestReport) -> None:
        """Count a draft and its accepted levels."""
        draft, fit = flight.draft, flight.arm.fit
        if draft.is_cold and not len(draft):
            return  # its kernels are being compiled
        shift, changes = fit.shift, fit.estimate.changes
        # A draft compared with the text counts its useful levels, others their verified levels.
        useful = 0 if flight.is_first else flight.useful if state.is_coupled else part.draft.depth
        if not flight.is_first:
            fit.estimate.requested(
                flight.levels, draft.depth if flight.depth is None else flight.depth, useful
            )
        if not part.applied or not len(draft):
            return
        if state.is_coupled:
            judged = Comparison(fit, draft, flight.levels, useful)
            if not judged.follow(part.request.tokens):
                judged.finish()
        elif len(part.draft):
            levels = flight.levels if part.draft.depth == draft.depth else part.draft.depth
            Comparison(fit, part.draft, levels, useful).judge(len(part.verdict.path), useful)
        if fit.shift != shift and not flight.arm.keeps_plan(flight.benefit, len(state.arms)):
            state.ready = None
        if fit.estimate.changes != changes:
            self.decisions.evaluate_again()

    def _measure(self, report: StepReport, used: Collection[Option]) -> None:
        """Measure a step's gain: its time, and the plain time of its tokens."""
        requests, here = len(report.requests), self.here
        if report.passes != 1 or not report.decodes_only or report.is_cold:
            return
        if not report.calls and report.rows == requests:
            self.reference.passes += 1
        if not used:
            return
        calls = {option.estimate.method: option.benefit.draft_seconds for option in used}
        self.decisions.note_calls(report.seconds, sum(calls.values()))
        drawn = sum([part.draws for part in report.requests])
        called = [part.request.request_id for part in report.with_drafts if part.called]
        if here is None or not drawn or not self._states.keys() >= set(called):
            return  # a fixed plan's cost says nothing about the others
        plain = here.seconds[min(requests, len(here.seconds) - 1)] * report.tokens / drawn
        for option in used:
            option.guard.gain.add(plain, report.seconds.total, drawn)

    def drafters(self) -> Sequence[Drafter]:
        return ()

    def use(self, settings: ControlSettings) -> None:
        """Use other settings from now on."""
        self.settings = self.explorer.settings = self.decisions.settings = settings

    def notifies(self, request: StepRequest) -> bool:
        """Return whether heads observe this request in the planned pass, which costs time if they are not in use."""
        state = self._states.get(request.request_id)
        return state is None or state.is_observed or not state.heads

    def _state(self, request: StepRequest) -> RequestState | None:
        """Return the request's state at the start of a pass; None: no drafts, or fixed ones."""
        plan = request.speculation
        if plan is None or plan.is_fixed:
            return None
        state = before = self._states.get(request.request_id)
        if plan.drafter.traits.may_be_absent:
            plan = replace(plan, method=present_name(plan))
            state = state if state is not None and state.method == plan.method else None
        if state is None:
            state = self._new_state(request, plan)
            if before is not None:
                state.is_observed, state.has_observed_all = before.is_observed, before.has_observed_all
        if state.heads:
            if before is not None and not state.is_observed:
                state.has_observed_all = False
            state.was_observed = state.is_observed
        return state

    def _new_state(self, request: StepRequest, plan: DraftPlan) -> RequestState:
        if len(self._states) >= self._most_states:
            self._states = {n: state for n, state in self._states.items() if state.request() is not None}
            self._most_states = max(2 * len(self._states), FEW_STATES)
        is_coupled = request.sampler.rule is Rule.COUPLED
        arms = [self._arm(request, one, is_coupled) for one in plans_of(plan)]
        state = self._states[request.request_id] = RequestState(plan.method, arms, is_coupled, ref(request))
        return state

    def _arm(self, request: StepRequest, plan: DraftPlan, is_coupled: bool) -> Arm:
        traits = plan.drafter.traits
        coverage = HEAD_COVERAGE if traits.kind is DraftSource.HEAD else PRIOR_COVERAGE
        tenant, published = request.drafter_view.tenant, traits.acceptance_by_level
        estimate = self.estimates.of(plan.method, tenant, request.cohort, coverage, published)
        estimate.need(min(plan.max_depth, plan.max_nodes))
        self._most_nodes = max(self._most_nodes, plan.max_nodes)
        if len(self.options) > len(self.estimates.known):
            known = set(self.estimates.known.values())
            self.options = {one: option for one, option in self.options.items() if one in known}
        option = self.options.setdefault(estimate, Option(estimate))
        if self.decision is None or option not in self.decision.benefits:
            self.decisions.evaluate_again()  # earlier decisions were made without it
        # Other rules may not cut sampled tokens by confidence.
        return Arm(plan, option, RequestFit(estimate), traits.stops_itself and is_coupled)
