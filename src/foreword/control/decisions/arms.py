"""Who could draft for a request, and what was decided about each."""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property

from foreword.control.decisions.asking import (
    NO_WORTH,
    DraftSeconds,
    Group,
    Pass,
    Worth,
    worked_levels,
)
from foreword.control.guard import PairGuard
from foreword.control.learning.estimates import NEW_ASKS, PairEstimate
from foreword.control.learning.hindsight import RequestFit
from foreword.control.learning.probes import BESIDE, BESIDE_EACH, MOST_PROBES
from foreword.control.settings import ControlSettings
from foreword.kv.extra_rows import KEPT_STATES
from foreword.speculation.confidence import Stop
from foreword.speculation.draft import Draft
from foreword.speculation.requests import DraftPlan

LEAST_LOSS = 0.01
"""What trying a drafter is taken to lose at least, in plain tokens of each request: its promise may be wrong."""

PROBE_DEPTH = 4
"""Levels of a probe where every level costs."""

TRIAL_STEPS = 64
"""In one step of so many a level more, or one less, is verified than seems best: what was measured once of a depth that
is not in use may have been an accident, and would else be believed for ever."""

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
    worth: Worth = NO_WORTH  # in the next pass
    usual_gain: float = NO_WORTH.gain  # without the prompts that are read in it
    is_on: bool = False
    is_left: bool = False  # whether others do as well in the present batch, for less
    reason: str = "new"
    is_cost_known: bool = False
    looked_at: float = -math.inf  # seconds of engine time, when the last decision was made
    is_near: bool = True  # whether guessing pays, or nearly does
    could_pay: bool = True  # whether it would if every guess were right
    probe_depth: int = 0
    probe_seconds: float = 0.0  # expected
    probe_pass: float = 0.0  # the same of as many requests as it is worth saving for, to be asked for at once
    probe_more: float = 0.0  # the same of one more request in the same call
    probe_behind: float = 0.0  # and of every token that the drafter has to catch up with
    _try_seconds: float = 0.0  # expected loss of one step in which its guesses are verified
    off_since: int | None = None  # step; None: it never was on
    switched: int = 0  # times that a decision was made
    _stops: dict[int | None, Stop] = field(default_factory=dict)  # by the luck of requests, as things are
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=MOST_DECISIONS))

    def decide(
        self, worth: Worth, usual_gain: float, is_cost_known: bool, settings: ControlSettings, now: Moment
    ) -> None:
        """Take a new look at what asking promises.

        What is new is tried on its promise. Once it was, it has to promise more than what noise may make of nothing.
        In a step with prompts rows are dear: that guesses do not pay in it is no reason to give them up. Nor is it one
        to go on: where many requests come, some prompt is being read at nearly every step.
        """
        if worth is not self.worth:
            self._stops.clear()
        self.worth, self.usual_gain, self.is_cost_known = worth, usual_gain, is_cost_known
        self.looked_at = now.seconds
        self.is_near = usual_gain >= settings.hopeless
        least = settings.margin_off + (0.0 if self.estimate.is_new else self._doubt(settings))
        if self.guard.trip(settings, now.reference_passes, now.seconds) or self.guard.holds(now.seconds):
            self._switch(False, "guard", now)
        elif self.is_on and usual_gain < least:
            self._switch(False, "loses", now)
        elif not self.is_on and (is_cost_known or self.is_new) and self._promises(settings, now):
            self._switch(True, "gains" if is_cost_known else "tried", now)

    def recall(self, worth: Worth, is_left: bool) -> None:
        """What was decided before holds again, as far as it is about the next pass."""
        if worth is not self.worth:
            self._stops.clear()
        self.worth, self.is_left = worth, is_left

    @property
    def may_guess(self) -> bool:
        """Whether it is in use, or nothing speaks against it yet."""
        return not self.is_left and (self.is_on or (self.is_new and self.is_near))

    @property
    def in_use(self) -> bool:
        return self.is_on and not self.is_left

    @property
    def is_new(self) -> bool:
        """Whether it was never in use. It is then tried on the strength of its promise: most requests are short."""
        return self.off_since is None

    def _promises(self, settings: ControlSettings, now: Moment) -> bool:
        has_rested = self.off_since is None or now.step - self.off_since >= settings.dwell_steps
        least = settings.margin_on + (0.0 if self.is_new else self._doubt(settings))
        return has_rested and self.usual_gain >= least

    def _doubt(self, settings: ControlSettings) -> float:
        """What noise may make of no gain at all: the more was asked the less."""
        return settings.doubt * math.sqrt(NEW_ASKS / max(self.estimate.counts.asks, NEW_ASKS))

    def price(self, group: Group, here: Pass, draft_seconds: DraftSeconds) -> None:
        """How deep probes go, and what they cost; what nobody has measured is taken to be as dear as a pass."""
        depth = group.depth
        costs_levels = draft_seconds(depth, 1) - draft_seconds(1, 1) > 0.01 * here.plain
        self.probe_depth = min(depth, PROBE_DEPTH) if costs_levels or not self.is_cost_known else depth
        self.probe_seconds = draft_seconds(self.probe_depth, 1) or here.plain
        self.probe_more = draft_seconds(self.probe_depth, 2) - draft_seconds(self.probe_depth, 1)
        several = min(group.asks, MOST_PROBES)
        together = draft_seconds(self.probe_depth, several) + several * BESIDE_EACH
        # Of what it takes to try a lookup for one request, most is the host's, and the same for several.
        self.probe_pass = together if self.probe_seconds < together <= 4 * BESIDE else self.probe_seconds
        self._try_seconds = self._live_price(group, here, draft_seconds)

    def _live_price(self, group: Group, here: Pass, draft_seconds: DraftSeconds) -> float:
        """Of a step in which this pair alone is asked: others share neither its calls nor what its rows make longer."""
        kept, asks = self.worth.kept, group.asks
        gained = asks * sum(group.rates.gains(0)[:kept]) * here.per_token
        longer = here.after(asks * sum(group.rates.coverage[:kept])) - here.plain
        longer += draft_seconds(worked_levels([group], self.worth.depth), asks)
        return max(longer - gained, 0.0) + LEAST_LOSS * asks * here.per_token

    def stop(self, shift: int | None) -> Stop:
        """Where drafts for requests with this luck end; None: they go on in any case."""
        found = self._stops.get(shift)
        if found is None:
            rates, least = self.estimate.rates.sure_rates(shift or 0), self.worth.stop
            found = self._stops[shift] = Stop(rates, () if shift is None else least)
        return found

    def live_loss(self, seconds: float) -> float:
        """Seconds that asking and verifying in one step is expected to lose."""
        if not self.is_cost_known or not self.worth.kept or self.guard.holds(seconds):
            return math.inf
        return self._try_seconds

    def varied(self, depth: int, step: int) -> int:
        """Levels to ask for: changing ones until it is known what a level costs, the same for all of a step."""
        return depth if self.is_cost_known else max(depth >> (step % 3), 1)

    def trial(self, step: int, most: int) -> int:
        """Levels to verify in one of `TRIAL_STEPS` for the sake of knowing; 0: as many as seem best."""
        if not self.is_cost_known or not self.worth.kept:
            return 0
        other = self.worth.kept + (1 if step // TRIAL_STEPS % 2 else -1)
        return other if 1 <= other <= most else 0

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
    is_stopping: bool = False  # whether its drafts end where going on is not worth it
    heard: int = 0  # tokens of the text that the drafter has been told of, or has read
    _planned: DraftPlan | None = None

    def behind(self, length: int) -> int:
        """Tokens of a text of this length that it has to catch up with; of a head, those whose states are kept."""
        missed = max(length - self.heard, 0)
        return missed if self.reading is None else min(missed, KEPT_STATES)

    def planned(self, depth: int, behind: int, stop: Stop | None) -> DraftPlan:
        """The plan for drafts of at most this depth, by a drafter that has this much to catch up with."""
        depth, planned = min(depth, self.plan.max_depth), self._planned
        if planned is None or planned.max_depth != depth or planned.stop is not stop:
            is_same = depth == self.plan.max_depth and stop is None
            planned = self.plan if is_same else replace(self.plan, max_depth=depth, stop=stop)
            self._planned = planned
        return replace(planned, behind=behind) if behind > 0 else planned

    def stop(self, stops: bool) -> Stop | None:
        """Where its drafts for this request end, or that they go on in any case; None: it does not stop."""
        if not self.is_stopping:
            return None
        return self.control.stop(self.fit.shift if stops else None)

    def worth_verifying(self, draft: Draft) -> int:
        """Levels of a draft; all of it, where nothing is said of single guesses."""
        if not draft.confidence or not draft.is_chain:
            return draft.depth
        chances = self.control.estimate.rates.survivals(draft, self.fit.shift)
        for level, (chance, least) in enumerate(zip(chances, self.control.worth.least, strict=False)):
            if chance < least:
                return level
        return len(draft)

    @cached_property
    def reading(self) -> DraftPlan | None:
        """The plan for a pass of the prompt: nothing is asked, but a head reads along; None: it is no head."""
        has_states = bool(self.plan.drafter.traits.needs.taps)
        return replace(self.plan, max_nodes=0, max_depth=0) if has_states else None

    @cached_property
    def is_lookup(self) -> bool:
        """Whether it needs nothing but the text."""
        return not self.plan.drafter.traits.needs

    @property
    def pays(self) -> bool:
        """Whether asking for this request promises a gain."""
        control = self.control
        worth = control.worth
        return (
            control.is_on and not control.is_left and self.fit.shift >= worth.least_shift and worth.gain > 0
        )

    @property
    def promise(self) -> float:
        """What it promises for this request, to be compared with other drafters."""
        worth, rates = self.control.worth, self.control.estimate.rates
        usual, own = sum(rates.survival(0)[: worth.kept]), sum(rates.survival(self.fit.shift)[: worth.kept])
        return worth.gain * own / usual if usual > 0 else worth.gain
