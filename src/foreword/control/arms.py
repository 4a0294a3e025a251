"""Who could draft for a request, and what was decided about each."""

import math
from collections import deque
from dataclasses import dataclass, field, replace

from foreword.control.asking import NO_WORTH, DraftSeconds, Pass, Worth
from foreword.control.estimates import PairEstimate
from foreword.control.guard import PairGuard
from foreword.control.hindsight import RequestFit, Waiting
from foreword.control.settings import ControlSettings
from foreword.speculation.draft import Draft
from foreword.speculation.requests import DraftPlan

MOST_WAITING = 4
"""Drafts of one request that wait for their text; the oldest is given up for another."""

LEAST_LOSS = 0.01
"""What trying a drafter is taken to lose at least, in plain tokens: its promise may be wrong."""

PROBE_DEPTH = 4
"""Levels of a probe where every level costs."""


MOST_DECISIONS = 20
"""Of a pair, that are remembered."""


@dataclass(frozen=True)
class Decision:
    """A drafter was switched on or off in a cohort."""

    seconds: float  # of engine time
    is_on: bool
    reason: str
    gain: float  # that was expected of it


@dataclass(frozen=True)
class Moment:
    """When a decision is made."""

    step: int
    seconds: float  # of engine time
    reference_passes: int  # plain passes that were measured


@dataclass(eq=False)
class PairControl:
    """What was decided about a drafter in a cohort."""

    estimate: PairEstimate
    guard: PairGuard = field(default_factory=PairGuard)
    worth: Worth = NO_WORTH
    is_on: bool = False
    reason: str = "new"
    is_cost_known: bool = False
    probe_depth: int = 0
    probe_seconds: float = 0.0  # expected
    off_since: int | None = None  # step; None: it never was on
    switched: int = 0  # times that a decision was made
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=MOST_DECISIONS))
    _probes: int = 0

    def decide(self, worth: Worth, is_cost_known: bool, settings: ControlSettings, now: Moment) -> None:
        """Take a new look at what asking promises."""
        self.worth, self.is_cost_known = worth, is_cost_known
        if self.guard.trip(settings, now.reference_passes, now.seconds) or self.guard.holds(now.seconds):
            self._switch(False, "guard", now)
        elif self.is_on and self.worth.gain < settings.margin_off:
            self._switch(False, "loses", now)
        elif not self.is_on and (is_cost_known or self.is_new) and self._promises(settings, now):
            self._switch(True, "gains" if is_cost_known else "tried", now)

    @property
    def is_new(self) -> bool:
        """Whether it was never in use. It is then tried on the strength of its promise: most requests are short."""
        return self.off_since is None

    def _promises(self, settings: ControlSettings, now: Moment) -> bool:
        has_rested = self.off_since is None or now.step - self.off_since >= settings.dwell_steps
        return has_rested and self.worth.gain >= settings.margin_on

    def price(self, depth: int, here: Pass, draft_seconds: DraftSeconds) -> None:
        """How deep probes go, and what they cost; what nobody has measured is taken to be as dear as a pass."""
        costs_levels = draft_seconds(depth, 1) - draft_seconds(1, 1) > 0.01 * here.plain
        self.probe_depth = min(depth, PROBE_DEPTH) if costs_levels or not self.is_cost_known else depth
        self.probe_seconds = draft_seconds(self.probe_depth, 1) or here.plain

    def live_loss(self, seconds: float) -> float:
        """What asking and verifying is expected to lose, in tokens of plain decoding for each request."""
        if not self.is_cost_known or not self.worth.kept or self.guard.holds(seconds):
            return math.inf
        return LEAST_LOSS + max(-self.worth.gain, 0.0)

    def next_probe(self) -> int:
        """Levels of the next probe: of changing depths until it is known what a level costs."""
        self._probes += 1
        return max(self.probe_depth >> (self._probes % 3), 1) if not self.is_cost_known else self.probe_depth

    def _switch(self, on: bool, reason: str, now: Moment) -> None:
        if self.is_on and not on:
            self.off_since = now.step
        if (on, reason) != (self.is_on, self.reason):
            self.decisions.append(Decision(now.seconds, on, reason, self.worth.gain))
            self.switched += 1
        self.is_on, self.reason = on, reason


@dataclass(eq=False)
class Arm:
    """One drafter for one request."""

    plan: DraftPlan  # the most that may be asked
    control: PairControl
    fit: RequestFit
    _planned: DraftPlan | None = None

    def planned(self, depth: int) -> DraftPlan:
        """The plan for drafts of at most this depth."""
        depth = min(depth, self.plan.max_depth)
        if self._planned is None or self._planned.max_depth != depth:
            self._planned = self.plan if depth == self.plan.max_depth else replace(self.plan, max_depth=depth)
        return self._planned

    @property
    def pays(self) -> bool:
        """Whether asking for this request promises a gain."""
        return self.control.is_on and self.fit.shift >= self.control.worth.least_shift

    @property
    def promise(self) -> float:
        """What it promises for this request, to be compared with other drafters."""
        worth, rates = self.control.worth, self.control.estimate.rates
        usual, own = sum(rates.survival(0)[: worth.kept]), sum(rates.survival(self.fit.shift)[: worth.kept])
        return worth.gain * own / usual if usual > 0 else worth.gain


@dataclass(eq=False)
class RequestRecord:
    """What the policy keeps of a request while it is there."""

    arms: list[Arm]
    is_coupled: bool  # whether a guess is accepted if and only if it is the token that comes
    waiting: list[Waiting] = field(default_factory=list)
    asked: Arm | None = None  # in the pass under way
    asked_depth: int = 0
    is_probe: bool = False  # whether the draft is only to be compared with the text
    offered_depth: int = 0  # of what came

    def ask(self, arm: Arm | None, depth: int = 0, is_probe: bool = False) -> DraftPlan | None:
        """A new pass, in which this drafter is asked; None: nobody."""
        self.asked, self.asked_depth, self.is_probe, self.offered_depth = arm, depth, is_probe, 0
        return None if arm is None else arm.planned(depth)

    def keep_aside(self, draft: Draft) -> None:
        """A draft that is compared with the text when it has come."""
        assert self.asked is not None
        self.waiting.append(Waiting(self.asked.fit, draft))
        del self.waiting[:-MOST_WAITING]

    def follow(self, tokens: list[int]) -> None:
        """The text has grown."""
        if self.waiting:
            self.waiting = [waiting for waiting in self.waiting if not waiting.follow(tokens)]
