"""Caches decisions: most steps resemble the previous one and reuse its decision."""

from collections.abc import Sequence
from dataclasses import replace
from math import log

from foreword.control.decision import Decision, Evaluation
from foreword.control.options import Moment
from foreword.control.requests import RequestState
from foreword.control.settings import ControlSettings
from foreword.control.value import Pass
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StageSeconds

MOST_KINDS, LEAST_TABLE, STEADY = 32, 64, 0.12
"""Number of cached decisions; rows for which costs are read at once; relative change of the batch that
triggers a new evaluation."""

SLOW_CALL, SLOW_CALLS, CLOSELY, CLOSE_STEPS = 0.2, 4, 16, 8
"""Slow calls: excess over the expected time as a fraction of a step, and consecutive steps, before calls
count as slow. Then this many evaluations follow, at this interval in steps."""


class Decisions:
    """Cached decisions by kind of pass, and the costs that they are based on."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.table: list[float] = []  # [rows], expected seconds of a step
        self.newest: Decision | None = None
        self._context = 0  # of the table
        self._tables: dict[int, list[float]] = {}  # by context band, since the last evaluation
        self._here: Pass | None = None  # the last pass
        self._known: dict[tuple[int, int], Decision] = {}  # by kind: passes with and without prompts
        self._wait = settings.decision_steps
        self._close_evaluations = self._slow_calls = 0  # remaining close evaluations; consecutive slow steps

    def pass_of(self, drawn: int, rows: int, most: int, context: int, situation: Situation) -> Pass | None:
        """Return a pass without drafts that may have `most` more rows; None before any step was measured."""
        needed = rows + most
        self.table, self._context = self._tables.get(situation.costs.band(context), []), context
        known = len(self.table)
        if needed >= known or (known > 4 * LEAST_TABLE and 8 * needed < known):
            self._read_costs(needed, situation)
        here = self._here
        if here is None or here.drawn != drawn or here.rows != rows or here.seconds is not self.table:
            here = self._here = Pass.of(drawn, rows, self.table) if self.table and drawn else None
        return here

    def decide(
        self, here: Pass, states: Sequence[RequestState | None], situation: Situation, now: Moment
    ) -> Decision:
        """Return the decision for this kind of pass; re-evaluate if due."""
        kind = _kind_of(here)
        known = self._known.get(kind)
        if known is None or self.is_due(known, now):
            self._tables.clear()
            self._read_costs(len(self.table) // 2, situation)
            here = self._here = replace(here, seconds=self.table)
            together = frozenset() if self.newest is None else self.newest.drafters
            found = Evaluation(states, here, situation, self.settings, now).decide(together)
            self._wait = self._next_wait(found, known)
            if len(self._known) >= MOST_KINDS:
                self._known.clear()
            known = self._known[kind] = found
        self.newest = known
        return known

    def is_due(self, known: Decision, now: Moment) -> bool:
        """Return whether it is time for another evaluation."""
        is_late = now.seconds - known.at.seconds >= self.settings.decision_seconds * (1 + known.is_settled)
        return is_late or now.step - known.at.step >= self._wait

    def evaluate_again(self) -> None:
        """Evaluate everything in the next step."""
        self._known.clear()

    def note_calls(self, seconds: StageSeconds, expected: float) -> None:
        """Detect calls that became far slower than expected; then evaluate immediately and often."""
        self._slow_calls = self._slow_calls + 1 if seconds.draft - expected > SLOW_CALL * seconds.total else 0
        if self._slow_calls == SLOW_CALLS:
            self._slow_calls, self._close_evaluations = 0, CLOSELY
            self._known.clear()

    def _next_wait(self, found: Decision, before: Decision | None) -> int:
        """Return the steps until the next evaluation: fewer if less is known or more has changed."""
        usual, in_use = self.settings.decision_steps, found.in_use
        is_same = before is not None and found.is_like(before)
        wait = min(max(2 * self._wait, usual), 4 * usual) if is_same else usual
        if not all(option.is_cost_known for option in in_use):
            wait = 2
        elif any(option.estimate.is_unsettled for option in in_use):
            wait = usual // 8 if any(option.estimate.is_new for option in in_use) else usual // 2
        if self._close_evaluations:
            self._close_evaluations, wait = self._close_evaluations - 1, min(wait, CLOSE_STEPS)
        return wait

    def _read_costs(self, rows: int, situation: Situation) -> None:
        self.table = situation.costs.step_table(max(2 * rows, LEAST_TABLE), self._context) or []
        self._tables[situation.costs.band(self._context)] = self.table


def _kind_of(here: Pass) -> tuple[int, int]:
    """Return the kind of a pass: rounded numbers of tokens and of prompt rows."""
    drawn = here.drawn
    about = round(drawn) if drawn * STEADY < 1 else round(log(drawn) / log(1 + STEADY)) + 64
    return about, int(here.rows - drawn).bit_length()
