"""A drafter in a cohort: whether it is in use, why, and what trying it costs."""

import math
from collections import deque
from dataclasses import dataclass, field

from foreword.control.acceptance import PairEstimate
from foreword.control.budget import HOST_PASS, HOST_REQUEST, MOST_PROBES
from foreword.control.guard import PairGuard
from foreword.control.settings import ControlSettings
from foreword.control.value import NO_WORTH, DraftSeconds, Group, Pass, Worth, worked_levels
from foreword.speculation.confidence import Stop

LEAST_LOSS = 0.01
"""Loss of a verified try at least, in plain tokens of each request: its expected gain may be wrong."""

PROBE_DEPTH = 4
"""Levels of a shadow draft where every level costs."""

TRIAL_STEPS = 64
"""In one step of so many a level more, or one less, is verified than is best: its cost may be wrong."""

MOST_DECISIONS = 20
"""Decisions of a pair that are kept for reports."""


@dataclass(frozen=True)
class Decision:
    """A drafter was turned on or off in a cohort."""

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
    """The decisions about a drafter in a cohort."""

    estimate: PairEstimate
    guard: PairGuard = field(default_factory=PairGuard)
    worth: Worth = NO_WORTH  # in the next pass
    usual_gain: float = NO_WORTH.gain  # without the prompts that are computed in it
    is_on: bool = False
    is_left: bool = False  # whether other drafters do as well in the present batch, for less
    reason: str = "new"
    is_cost_known: bool = False
    looked_at: float = -math.inf  # seconds of engine time of the last evaluation
    is_near: bool = True  # whether drafting has a gain, or nearly
    could_pay: bool = True  # whether it would have one at full acceptance
    probe_depth: int = 0
    probe_seconds: float = 0.0  # expected time of a shadow draft
    probe_pass: float = 0.0  # the same of as many requests as are saved for, in one call
    probe_more: float = 0.0  # the same of one more request in the call
    probe_behind: float = 0.0  # the same of every token that the drafter has to catch up with
    _try_seconds: float = 0.0  # expected loss of one step in which its draft tokens are verified
    off_since: int | None = None  # step; None: it never was on
    switched: int = 0  # times that it was turned on or off
    _stops: dict[int | None, Stop] = field(default_factory=dict)  # by the acceptance ratio of requests
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=MOST_DECISIONS))

    def decide(
        self, worth: Worth, usual_gain: float, is_cost_known: bool, settings: ControlSettings, now: Moment
    ) -> None:
        """Turn the drafter on or off. Hysteresis is this rule alone.

        A new drafter is turned on at `margin_on`, later ones at more than noise makes of nothing. Steps with prompts do
        not count: their rows are expensive, and where many requests come nearly every step has a prompt.
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
        """Use an earlier decision again, as far as it is about the next pass."""
        if worth is not self.worth:
            self._stops.clear()
        self.worth, self.is_left = worth, is_left

    @property
    def may_draft(self) -> bool:
        """Whether it is in use, or nothing speaks against it yet."""
        return not self.is_left and (self.is_on or (self.is_new and self.is_near))

    @property
    def in_use(self) -> bool:
        return self.is_on and not self.is_left

    @property
    def is_new(self) -> bool:
        """Whether it was never in use. It is then tried on its expected gain: most requests are short."""
        return self.off_since is None

    def _promises(self, settings: ControlSettings, now: Moment) -> bool:
        has_rested = self.off_since is None or now.step - self.off_since >= settings.dwell_steps
        least = settings.margin_on + (0.0 if self.is_new else self._doubt(settings))
        return has_rested and self.usual_gain >= least

    def _doubt(self, settings: ControlSettings) -> float:
        """Return the gain that noise makes of none: the less the more drafts were requested."""
        least = settings.new_requests
        return settings.doubt * math.sqrt(least / max(self.estimate.counts.asks, least))

    def price(self, group: Group, here: Pass, draft_seconds: DraftSeconds) -> None:
        """Set the depth and the cost of trying it; an unmeasured call is taken to cost as much as a pass."""
        depth = group.depth
        costs_levels = draft_seconds(depth, 1) - draft_seconds(1, 1) > 0.01 * here.plain
        self.probe_depth = min(depth, PROBE_DEPTH) if costs_levels or not self.is_cost_known else depth
        self.probe_seconds = draft_seconds(self.probe_depth, 1) or here.plain
        self.probe_more = draft_seconds(self.probe_depth, 2) - draft_seconds(self.probe_depth, 1)
        several = min(group.asks, MOST_PROBES)
        together = draft_seconds(self.probe_depth, several) + several * HOST_REQUEST
        # Most of the cost of trying a lookup is the host's, and the same for several requests.
        self.probe_pass = together if self.probe_seconds < together <= 4 * HOST_PASS else self.probe_seconds
        self._try_seconds = self._live_price(group, here, draft_seconds)

    def _live_price(self, group: Group, here: Pass, draft_seconds: DraftSeconds) -> float:
        """Return the expected loss of a step in which this pair alone drafts."""
        kept, asks = self.worth.kept, group.asks
        gained = asks * sum(group.rates.gains(0)[:kept]) * here.per_token
        longer = here.after(asks * sum(group.rates.coverage[:kept])) - here.plain
        longer += draft_seconds(worked_levels([group], self.worth.depth), asks)
        return max(longer - gained, 0.0) + LEAST_LOSS * asks * here.per_token

    def stop(self, shift: int | None) -> Stop:
        """Return where drafts for requests with this acceptance ratio end; None: they go on in any case."""
        found = self._stops.get(shift)
        if found is None:
            rates, least = self.estimate.rates.sure_rates(shift or 0), self.worth.stop
            found = self._stops[shift] = Stop(rates, () if shift is None else least)
        return found

    def live_loss(self, seconds: float) -> float:
        """Return the seconds that drafting and verifying in one step is expected to lose."""
        if not self.is_cost_known or not self.worth.kept or self.guard.holds(seconds):
            return math.inf
        return self._try_seconds

    def varied(self, depth: int, step: int) -> int:
        """Return the levels to request: changing ones, by step, until the cost of a level is known."""
        return depth if self.is_cost_known else max(depth >> (step % 3), 1)

    def trial(self, step: int, most: int) -> int:
        """Return the levels to verify in one of `TRIAL_STEPS` to measure them; 0: as many as are best."""
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
