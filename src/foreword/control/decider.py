"""When costs and estimates are evaluated, and what is decided about all pairs of a batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from typing import NamedTuple

from foreword.control.budget import HOST_PASS, ExplorationBudget
from foreword.control.pairs import Moment, PairControl
from foreword.control.records import Arm, RequestRecord
from foreword.control.routing import Bid, Seats, best_together
from foreword.control.settings import ControlSettings
from foreword.control.value import DraftSeconds, Group, Pass, Worth, best_case, best_plan
from foreword.speculation.measured.situation import Situation
from foreword.speculation.requests import PassEntry

STEADY = 0.12
"""Part by which a batch may grow or shrink before everything is evaluated again."""

MOST_KINDS, LEAST_TABLE = 32, 64
"""Kinds of passes whose decisions are kept, and rows that costs are looked up for at once."""

WELL_ABOVE, FAR_ABOVE = 1.05, 1.12
"""Ratios to plain decoding from which on fewer plain windows show that there is a gain."""

SOONER, CLOSELY, CLOSE_STEPS = 8, 16, 8
"""Times as often everything is evaluated while a drafter in use is new; evaluations after so few steps when calls have
become slow: their cost is learned slowly."""

CHEAP = 0.05
"""Part of a plain step that a lookup's call takes at most if its levels are taken to cost nothing."""

_Kind = tuple[int, int]
"""Of passes that are decided about together: tokens, and rows of prompts, both roughly."""


class _Evaluation(NamedTuple):
    """What was decided about one kind of pass."""

    at: Moment
    found: Sequence[tuple[PairControl, Worth, bool]]  # the benefit of each pair, and whether it is left out


class Decider:
    """Evaluates costs and estimates now and then: most steps are like the one before."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.table: list[float] = []  # [rows], expected seconds of a step
        self.methods: tuple[str, ...] = ()  # drafters of the batch
        self.idle_methods: tuple[str, ...] = ()  # of these, those that are not in use for all requests
        self._controls: list[PairControl] = []  # of the batch
        self._together: frozenset[str] = frozenset()  # the drafters in use
        self.probe_share = settings.probe_share
        self.plain_share = 0.0  # of all steps, for plain windows
        self._context = 0  # of the table
        self._band = 0  # of contexts
        self._here: Pass | None = None  # the last pass
        # Prompts come and go: decisions about passes with and without them are kept apart.
        self._evaluated: dict[_Kind, _Evaluation] = {}
        self._kind: _Kind | None = None  # the one that holds at present
        self._wait = settings.decision_steps
        self._close_evaluations = 0  # that are left

    def look(self, entries: Sequence[PassEntry], situation: Situation) -> Pass | None:
        """Return the pass without drafts; None before any step was measured, or if no token is drawn."""
        drawn, rows, context, most = 0, 0, 0, 1
        for entry in entries:
            drawn += entry.draws
            rows += entry.run
            context += entry.computed
            plan = entry.request.speculation
            most += 0 if plan is None else plan.max_nodes
        if not drawn:
            return None
        context //= len(entries)
        needed, known = rows + most, len(self.table)
        is_too_long = known > 4 * LEAST_TABLE and 8 * needed < known
        if needed >= known or is_too_long or situation.costs.band(context) != self._band:
            self._read_costs(needed, context, situation)
        if not self.table:
            return None
        here = self._here
        if here is None or here.drawn != drawn or here.rows != rows or here.seconds is not self.table:
            here = self._here = Pass.of(drawn, rows, self.table)
        return here

    def evaluate_again(self) -> None:
        """Have everything evaluated in the next step."""
        self._evaluated.clear()

    def evaluate_closely(self) -> None:
        """Have everything evaluated in the next step, and often for a while: a cost has changed."""
        self._evaluated.clear()
        self._close_evaluations = CLOSELY

    def is_due(self, here: Pass, step: int, seconds: float) -> bool:
        """Return whether it is another kind of pass, or time: the sooner the less is known and the more has changed."""
        last = self._evaluated.get(_kind_of(here))
        if last is None or step - last.at.step >= self._wait:
            return True
        return seconds - last.at.seconds >= self.settings.decision_seconds

    def recall(self, here: Pass) -> None:
        """Use what was decided about passes of this kind."""
        kind = _kind_of(here)
        if kind != self._kind:
            self._kind = kind
            for control, worth, is_left in self._evaluated[kind].found:
                control.recall(worth, is_left)

    def knows(self, control: PairControl) -> bool:
        """Return whether a pair was among those that were evaluated last."""
        return control in self._controls

    @property
    def pairs(self) -> set[PairControl]:
        """Those that were evaluated last."""
        return set(self._controls)

    def affordable(self, budget: ExplorationBudget, seconds: float) -> set[PairControl]:
        """Return the pairs of the batch that can be tried; others are saved for."""
        return {
            control
            for control in (self._controls if budget.has_any else ())
            if budget.affords(
                control.estimate.method, HOST_PASS + min(control.probe_pass, control.live_loss(seconds))
            )
        }

    def decide(
        self, records: Sequence[RequestRecord | None], here: Pass, situation: Situation, now: Moment
    ) -> Pass:
        """Decide about all pairs that the batch has requests of; return the pass by present costs."""
        self._read_costs(len(self.table) // 2, self._context, situation)
        here = self._here = replace(here, seconds=self.table)
        present: dict[str, dict[PairControl, list[Arm]]] = {}
        for record in records:
            for arm in () if record is None else record.arms:
                present.setdefault(arm.plan.method, {}).setdefault(arm.control, []).append(arm)
        controls = [control for pairs in present.values() for control in pairs]
        before = [(control.in_use, control.worth.kept, control.worth.depth) for control in controls]
        for method, pairs in present.items():
            self._decide_method(method, pairs, here, situation, now)
        self.methods, self._controls = tuple(present), controls
        self._route(records, controls, here, situation)
        self.idle_methods = tuple(
            method for method, pairs in present.items() if not _is_in_use(pairs, len(records))
        )
        self.probe_share = self._share_for_probes(controls)
        self.plain_share = self._share_for_reference(controls)
        after = [(control.in_use, control.worth.kept, control.worth.depth) for control in controls]
        self._wait = self._next_wait(controls, is_same=before == after)
        if self._close_evaluations:
            self._close_evaluations, self._wait = self._close_evaluations - 1, min(self._wait, CLOSE_STEPS)
        if len(self._evaluated) >= MOST_KINDS:
            self._evaluated.clear()
        self._kind = _kind_of(here)
        self._evaluated[self._kind] = _Evaluation(now, [(one, one.worth, one.is_left) for one in controls])
        return here

    def _next_wait(self, present: Sequence[PairControl], is_same: bool) -> int:
        """Return the steps until the next evaluation."""
        usual = self.settings.decision_steps
        in_use = [control for control in present if control.in_use]
        if not all(control.is_cost_known for control in in_use):
            return 2
        if any(control.estimate.is_new for control in in_use):
            return usual // SOONER
        if any(control.estimate.is_unsettled for control in in_use):
            return usual // 2
        return min(max(2 * self._wait, usual), 4 * usual) if is_same else usual

    def _read_costs(self, rows: int, context: int, situation: Situation) -> None:
        self.table = situation.costs.step_table(max(2 * rows, LEAST_TABLE), context) or []
        self._context, self._band = context, situation.costs.band(context)

    def _decide_method(
        self,
        method: str,
        pairs: dict[PairControl, list[Arm]],
        here: Pass,
        situation: Situation,
        now: Moment,
    ) -> None:
        known: dict[tuple[float, int], float] = {}  # the same few are needed again and again
        groups = []
        for control, arms in pairs.items():
            control.estimate.refresh(now.seconds)
            depth = max(min(arm.plan.max_depth, arm.plan.max_nodes) for arm in arms)
            most, is_stopping = min(depth, self.settings.max_depth), all(arm.is_stopping for arm in arms)
            groups.append(Group(control.estimate.rates, len(arms), most, is_stopping=is_stopping))
        deepest, asks = max(group.depth for group in groups), sum(group.asks for group in groups)
        # A lookup that is cheap at its deepest costs the same at any depth, whatever noise says: all levels are
        # requested, and so the acceptance of deeper ones is known.
        are_lookups = all(arm.is_lookup for arms in pairs.values() for arm in arms)
        is_cheap = situation.costs.draft_seconds(method, deepest, asks) < CHEAP * here.plain
        least = deepest if are_lookups and is_cheap else 1  # levels that a call costs at least

        def draft_seconds(levels: float, asks: int) -> float:
            levels = max(levels, least)
            found = known.get((levels, asks))
            if found is None:
                found = known[levels, asks] = situation.costs.draft_seconds(method, levels, asks)
            return found

        worths = best_plan(here, groups, draft_seconds)
        alone = here.without_prompts()
        usual = worths if alone is here else best_plan(alone, groups, draft_seconds)
        if len(groups) == groups[0].asks == 1:
            (arm,) = next(iter(pairs.values()))
            worths = [_own_depth(here, groups[0], arm.fit.shift, worths[0], draft_seconds)]
        is_known = situation.costs.knows_calls(method)
        for control, group, worth, as_usual in zip(pairs, groups, worths, usual, strict=True):
            control.decide(worth, as_usual.gain, is_known, self.settings, now)
            control.price(group, here, draft_seconds)
            control.probe_behind = situation.costs.behind_seconds(method)
            control.could_pay = best_case(alone, group, draft_seconds) >= self.settings.margin_on

    def _route(
        self,
        records: Sequence[RequestRecord | None],
        controls: Sequence[PairControl],
        here: Pass,
        situation: Situation,
    ) -> None:
        """Leave out the drafters whose calls have no benefit beside the others."""
        if len(self.methods) == 1:
            for control in controls:
                control.is_left = False
            return
        found = Counter(
            tuple(arm.control for arm in record.arms if arm.control.is_on)
            for record in records
            if record is not None
        )
        seats = [Seats(count, [_bid(control) for control in some]) for some, count in found.items() if some]
        self._together = best_together(here, seats, self._together, situation.costs.draft_seconds)
        for control in controls:
            control.is_left = control.is_on and control.estimate.method not in self._together

    def _share_for_probes(self, present: Sequence[PairControl]) -> float:
        """Return the share of time for exploration; a new cohort of a known drafter needs little."""
        settings, share = self.settings, self.settings.idle_probe_share
        for control in present:
            if not control.could_pay:
                continue
            is_unknown = not control.is_cost_known or control.estimate.is_unknown
            if is_unknown and control.is_near:
                return settings.probe_share
            share = settings.watch_share if is_unknown or control.is_near else share
        return share

    def _share_for_reference(self, present: Sequence[PairControl]) -> float:
        """Return the share of plain windows: none where no drafter is on, less the higher every gain is."""
        in_use = [control for control in present if control.is_on]
        return self.settings.reference_share * max(map(self._doubt, in_use), default=0.0)

    def _doubt(self, control: PairControl) -> float:
        """Return the part of the plain windows that a pair needs: a gain that is expected and measured needs few."""
        expected, measured = 1 + control.worth.gain, control.guard.gain.bounds()
        least = expected if measured is None else min(expected, measured[0])
        if least < WELL_ABOVE or not control.is_cost_known:
            return 1.0
        return self.settings.sure_reference if measured is not None and least >= FAR_ABOVE else 0.5


def _is_in_use(pairs: Mapping[PairControl, Sequence[Arm]], running: int) -> bool:
    """Return whether a drafter drafts for all of these: not in the shadow, and at every acceptance ratio."""
    return all(arm.pays and arm.plan.allows(running) for arms in pairs.values() for arm in arms)


def _own_depth(here: Pass, group: Group, shift: int, worth: Worth, draft_seconds: DraftSeconds) -> Worth:
    """Return the depth by the request's own acceptance ratio where it is alone; on and off are the cohort's."""
    if not shift or not worth.kept:
        return worth
    (own,) = best_plan(here, [replace(group, shift=shift)], draft_seconds)
    return replace(worth, depth=own.depth, kept=own.kept) if own.kept else worth


def _bid(control: PairControl) -> Bid:
    """Return what its drafter does for an average request of its cohort."""
    worth, rates = control.worth, control.estimate.rates
    tokens, rows = sum(rates.gains(0)[: worth.kept]), sum(rates.coverage[: worth.kept])
    return Bid(control.estimate.method, tokens, rows, rates.coverage[0], worth.levels)


def _kind_of(here: Pass) -> _Kind:
    drawn = here.drawn
    about = round(drawn) if drawn * STEADY < 1 else round(log(drawn) / log(1 + STEADY)) + 64
    return about, int(here.rows - drawn).bit_length()
