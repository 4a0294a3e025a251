"""An option: a drafter in a cohort, whether it is on, and why."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from foreword.control.acceptance import Estimate
from foreword.control.guard import Guard
from foreword.control.settings import DEFAULTS, ControlSettings
from foreword.control.value import NO_BENEFIT, Benefit

MOST_SWITCHES = 20
"""Number of switches kept per option for reports."""


class SwitchRecord(NamedTuple):
    """Record of turning a drafter on or off in a cohort."""

    seconds: float  # engine time
    is_on: bool
    reason: str
    gain: float  # expected gain


class Moment(NamedTuple):
    """Time of a decision."""

    step: int
    seconds: float  # engine time
    reference_passes: int  # measured plain passes


@dataclass(eq=False)
class Option:
    """A drafter for the requests of a cohort, with its state across decisions."""

    estimate: Estimate
    guard: Guard = field(default_factory=Guard)
    benefit: Benefit = NO_BENEFIT  # at the last decision
    usual_gain: float = 0.0  # expected gain in a pass without prompt chunks
    is_on: bool = False
    reason: str = "new"
    is_cost_known: bool = False
    # tokens per step that a lookup gains if it is called before another drafter; first a prior
    first_gain: float = DEFAULTS.first_gain
    off_since: int | None = None  # step at which it was last turned off; None: never turned off
    switched: int = 0  # number of switches
    switches: deque[SwitchRecord] = field(default_factory=lambda: deque(maxlen=MOST_SWITCHES))

    @property
    def is_new(self) -> bool:
        """Whether it was never turned off. It may then turn on before its cost is measured: most requests are short."""
        return self.off_since is None

    def may_be_used(self, settings: ControlSettings) -> bool:
        """Return whether it is on or may turn on soon: never used so far, and near break-even."""
        return self.is_on or (self.is_new and self.usual_gain >= settings.hopeless)

    def gains_first(self, seconds: float, per_token: float) -> bool:
        """Return whether a lookup's call before another drafter, which takes `seconds`, gains more than it costs."""
        return self.first_gain * per_token > seconds + DEFAULTS.probe_host_seconds / 8

    def decide(self, benefit: Benefit, usual_gain: float, settings: ControlSettings, now: Moment) -> None:
        """Turn the drafter on or off by its gain without the prompts of this pass.

        This is the only hysteresis. A drafter first turns on at `margin_on`, and after it was off at `margin_on` plus
        the doubt about its estimate. Prompts are excluded because their rows are expensive, and under load nearly
        every step has one.
        """
        self.benefit, self.usual_gain = benefit, usual_gain
        estimate, least = self.estimate, settings.new_requests
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

    def _switch(self, on: bool, reason: str, now: Moment) -> None:
        if self.is_on and not on:
            self.off_since = now.step
        if (on, reason) != (self.is_on, self.reason):
            self.switches.append(SwitchRecord(now.seconds, on, reason, self.benefit.gain))
            self.switched += 1
        self.is_on, self.reason = on, reason
