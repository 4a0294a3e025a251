"""A drafter in a cohort: whether it is on, and why."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from foreword.control.acceptance import Estimate
from foreword.control.guard import Guard
from foreword.control.settings import ControlSettings
from foreword.control.value import NO_BENEFIT, Benefit
from foreword.speculation.confidence import Stop

MOST_SWITCHES = 20
"""Switches of an option that are kept for reports."""


@dataclass(frozen=True)
class Switch:
    """A drafter was turned on or off in a cohort."""

    seconds: float  # of engine time
    is_on: bool
    reason: str
    gain: float  # that was expected of it


class Moment(NamedTuple):
    """When a decision is made."""

    step: int
    seconds: float  # of engine time
    reference_passes: int  # plain passes that were measured


@dataclass(eq=False)
class Option:
    """A drafter for the requests of a cohort: its state over all decisions."""

    estimate: Estimate
    guard: Guard = field(default_factory=Guard)
    benefit: Benefit = NO_BENEFIT  # of the last decision about it
    usual_gain: float = 0.0  # the same without the prompts of its pass
    is_on: bool = False
    reason: str = "new"
    is_cost_known: bool = False
    decided_at: float = -math.inf  # seconds of engine time
    off_since: int | None = None  # step; None: it never was on
    switched: int = 0  # times that it was turned on or off
    switches: deque[Switch] = field(default_factory=lambda: deque(maxlen=MOST_SWITCHES))

    @property
    def is_new(self) -> bool:
        """Whether it was never in use. It is then tried on its expected gain: most requests are short."""
        return self.off_since is None

    def may_be_used(self, settings: ControlSettings) -> bool:
        """Return whether nothing speaks against it yet."""
        return self.is_new and not self.is_on and self.usual_gain >= settings.hopeless

    def decide(self, benefit: Benefit, usual_gain: float, settings: ControlSettings, now: Moment) -> None:
        """Turn the drafter on or off by its gain without the prompts of this pass. Hysteresis is this rule alone.

        A new drafter is turned on at `margin_on`, later at more than noise makes of nothing. Steps with prompts do not
        count: their rows are expensive, and where many requests come nearly every step has a prompt.
        """
        self.benefit, self.usual_gain, self.decided_at = benefit, usual_gain, now.seconds
        estimate = self.estimate
        least = settings.new_requests
        doubt = settings.doubt * math.sqrt(least / max(estimate.counts.requests, least))
        has_rested = self.off_since is None or now.step - self.off_since >= settings.dwell_steps
        may_begin = has_rested and (self.is_cost_known or self.is_new)
        if self.guard.holds(settings, now.reference_passes, now.seconds):
            self._switch(False, "guard", now)
        elif self.is_on:
            if usual_gain < settings.margin_off + (0.0 if estimate.is_new else doubt):
                self._switch(False, "loses", now)
        elif may_begin and usual_gain >= settings.margin_on + (0.0 if self.is_new else doubt):
            self._switch(True, "gains" if self.is_cost_known else "tried", now)

    def stop(self, benefit: Benefit, shift: int | None) -> Stop:
        """Return where drafts for requests with this acceptance ratio end; None: they go on in any case."""
        rates = self.estimate.rates.sure_rates(shift or 0)
        return Stop(rates, () if shift is None else benefit.stop)

    def _switch(self, on: bool, reason: str, now: Moment) -> None:
        if self.is_on and not on:
            self.off_since = now.step
        if (on, reason) != (self.is_on, self.reason):
            self.switches.append(Switch(now.seconds, on, reason, self.benefit.gain))
            self.switched += 1
        self.is_on, self.reason = on, reason
