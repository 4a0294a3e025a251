"""Roll-out of one (drafter, cohort) pair: a drafter in one cohort of the policy file."""

import hashlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from foreword.control.policy_file.document import RolloutRule, Stage
from foreword.control.rollout.distributions import DistributionComparison, Figures
from foreword.control.rollout.evidence import Outcome, is_improbable
from foreword.control.rollout.guards import Arms, DrafterHealth, reason_to_roll_back, reason_to_stop

MOST_MOVES = 20
"""Number of latest stage changes in reports."""

PROMOTE_RATIO, PROMOTE_CHANCE = 1.02, 0.9
"""Promotion from the shadow stage: the speed exceeds this ratio to plain decoding with more than this probability."""

DROP_RATIO, DROP_CHANCE = 1.0, 0.05
"""End in the shadow stage: the speed exceeds this ratio to plain decoding with less than this probability."""

LEAST_LEVELS = 20
"""Minimum draft tokens compared with the text before a drafter's roll-out ends in the shadow stage."""


@dataclass
class Switch:
    """Stops a drafter for all requests of a cohort at the next step."""

    is_off: bool = False  # stopped permanently: the roll-out is off or held
    is_paused: bool = False  # stopped while the engine is overloaded


@dataclass(frozen=True)
class Gate:
    """Whether a drafter in a roll-out may draft for one request, and whether the target's pass may use its drafts."""

    switch: Switch
    is_live: bool = True  # False: drafts are only compared with the text

    @property
    def is_open(self) -> bool:
        """Whether the target's pass may use drafts."""
        return self.is_live and not self.switch.is_off and not self.switch.is_paused

    @property
    def may_observe(self) -> bool:
        """Whether drafts may be compared with the text."""
        return not self.switch.is_off and not self.switch.is_paused


@dataclass(frozen=True)
class Forecast:
    """Expected speed of a drafter in the shadow stage."""

    levels: float = 0.0  # number of draft tokens compared with the text
    gain: float = 0.0  # speed as ratio to plain decoding
    error: float = math.inf  # standard error of the gain; infinite: no estimate

    def chance_above(self, ratio: float) -> float:
        """Return the probability that the gain exceeds this ratio, if its error is normally distributed."""
        if not math.isfinite(self.error):
            return 0.5
        return 0.5 * math.erfc((ratio - self.gain) / (max(self.error, 1e-9) * math.sqrt(2)))


@dataclass(frozen=True)
class Move:
    """A change of stage."""

    at: float  # seconds since 1970
    stage: Stage
    percent: float  # percentage of requests that may use the drafter
    reason: str


@dataclass
class PairRollout:
    """The roll-out of one (drafter, cohort) pair: its stage, and the evidence since that stage began."""

    rule: RolloutRule
    clock: Callable[[], float]  # seconds since 1970
    by_hand: bool = False  # created by the operator; not in the file
    stage: Stage = Stage.OFF
    step: int = 0  # index of the canary step
    since: float = 0.0  # seconds since 1970 at which the stage or canary step began
    reason: str = ""  # why the stage was entered
    is_ready: bool = False  # ready for promotion, which waits for the operator
    decoded_again: int = 0  # requests decoded again with the drafter, in the verify stage
    mismatches: int = 0  # those whose answer differs with the drafter
    # Those whose answer differs without the drafter, because texts depend on the other requests of a pass.
    plain_mismatches: int = 0
    # Compares answers sampled with and without the drafter.
    distributions: DistributionComparison = field(default_factory=DistributionComparison)
    arms: Arms = field(default_factory=Arms)
    switch: Switch = field(default_factory=Switch)
    moves: deque[Move] = field(default_factory=lambda: deque(maxlen=MOST_MOVES))

    def begin(self) -> None:
        """Start at the stage of the policy file."""
        self.move(Stage(self.rule.start), "first stage in the policy file")

    @property
    def percent(self) -> float:
        """Percentage of requests that may use the drafter."""
        if self.stage is Stage.CANARY:
            return self.rule.steps[self.step]
        return 100.0 if self.stage is Stage.ON else 0.0

    def is_canary(self, tenant: str, request_id: str) -> bool:
        """Return whether a request belongs to the canary.

        The result is a hash of the request, so a larger percentage adds requests and removes none.
        """
        text = "\0".join((self.rule.salt, self.rule.drafter, self.rule.cohort, tenant, request_id))
        fraction = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
        return 100 * fraction < self.percent

    def gate(self, tenant: str, request_id: str) -> Gate | None:
        """Return the drafter's gate for a new request; None: it may not draft for the request."""
        match self.stage:
            case Stage.OFF | Stage.HELD:
                return None
            case Stage.SHADOW | Stage.VERIFY:
                return Gate(self.switch, is_live=False)
            case Stage.CANARY if not self.is_canary(tenant, request_id):
                return None  # the drafter must not slow down these requests
        return Gate(self.switch)

    def move(self, stage: Stage, reason: str, step: int = 0) -> None:
        """Change the stage and discard earlier evidence."""
        if stage in (Stage.OFF, Stage.HELD):
            self.switch.is_off = True  # for all requests, from the next step
        elif self.switch.is_off:
            self.switch = Switch()
        earlier_control = self.arms.control
        self.stage, self.step, self.reason, self.is_ready = stage, step, reason, False
        self.since, self.arms, self.distributions = self.clock(), Arms(), DistributionComparison()
        self.decoded_again = self.mismatches = self.plain_mismatches = 0
        if stage is Stage.CANARY and self.percent >= 100:
            self.arms.control = (
                earlier_control  # all requests are in the canary, so none is left to compare with
            )
        self.moves.append(Move(self.since, stage, self.percent, reason))

    def evaluate(self, health: DrafterHealth, forecast: Forecast) -> bool:
        """Promote or roll back if the evidence suffices; return whether the stage or canary step changed."""
        old_stage = (self.stage, self.step)
        if self.stage in (Stage.OFF, Stage.HELD):
            return False
        is_used = self.stage in (Stage.CANARY, Stage.ON)
        reason = reason_to_stop(health, self.rule.guards)
        # A reason begins with its guard's name. Before the canary, `_evaluate_shadow` judges the gain instead.
        if reason is not None and (is_used or not reason.startswith("gain")):
            self.move(Stage.HELD, reason)
        elif self.stage is Stage.SHADOW:
            self._evaluate_shadow(forecast)
        elif self.stage is Stage.CANARY:
            self._evaluate_canary()
        return (self.stage, self.step) != old_stage

    def _evaluate_shadow(self, forecast: Forecast) -> None:
        result = f"expected speed {forecast.gain:.3f} of plain decoding, {forecast.levels:.0f} draft tokens compared"
        # A slow drafter is called rarely, so it would take long to compare `min_levels` tokens: a twentieth suffices
        # to end its roll-out.
        early = max(self.rule.min_levels // 20, LEAST_LEVELS)
        if forecast.levels >= early and forecast.chance_above(DROP_RATIO) < DROP_CHANCE:
            self.move(Stage.OFF, f"low gain: {result}")
        elif (
            forecast.levels >= self.rule.min_levels and forecast.chance_above(PROMOTE_RATIO) > PROMOTE_CHANCE
        ):
            self._promote(Stage.VERIFY, 0, result)

    def _evaluate_canary(self) -> None:
        reason = reason_to_roll_back(self.arms, self.rule.guards)
        if reason is not None:
            self.move(Stage.HELD, reason)
            return
        arms = (self.arms.canary, self.arms.control)
        min_requests, min_passes = self.rule.min_requests, self.rule.min_passes
        if all(arm.requests >= min_requests and arm.passes >= min_passes for arm in arms):
            result = f"all guards clear after {self.arms.canary.requests} requests at {self.percent:g}%"
            self._promote(*self._after_canary_step(), result)

    def _after_canary_step(self) -> tuple[Stage, int]:
        """Return the stage after the current canary step, and its canary step."""
        is_last = self.step + 1 == len(self.rule.steps)
        return (Stage.ON, 0) if is_last else (Stage.CANARY, self.step + 1)

    def add_outcome(self, outcome: Outcome, is_canary: bool) -> None:
        """Add the outcome of a request to its arm."""
        if self.stage is Stage.CANARY:
            (self.arms.canary if is_canary else self.arms.control).add(outcome)

    def add_comparison(self, difference: str | None, is_plain_different: bool = False) -> None:
        """Count a request that was decoded again; `difference` says how the answer with the drafter differs.

        If texts depend on the batch, the request was also decoded again without the drafter; `is_plain_different`:
        that answer differs, too.
        """
        if self.stage is not Stage.VERIFY:
            return
        self.decoded_again += 1
        self.mismatches += difference is not None
        self.plain_mismatches += is_plain_different
        if difference is not None and is_improbable(self.mismatches, self.plain_mismatches):
            also = f"; {self.plain_mismatches} without the drafter" if self.plain_mismatches else ""
            counts = f"{self.mismatches} of {self.decoded_again} requests decoded again{also}"
            self.move(Stage.HELD, f"mismatch: {difference} ({counts})")
        elif self.decoded_again >= self.rule.verify_samples:
            result = f"{self.decoded_again} requests decoded again, {self.mismatches} differently"
            self._promote(Stage.CANARY, 0, result)

    def add_samples(self, plain: Figures, drafted: Figures, fault: str | None = None) -> None:
        """Compare two new answers to one request, sampled without and with the drafter, with different seeds.

        Acceptance rules that preserve only the distribution need this. `fault` says why the answer with the drafter
        is invalid.
        """
        self.distributions.add(plain, drafted)
        is_last = self.decoded_again + 1 >= self.rule.verify_samples
        self.add_comparison(fault or self.distributions.difference(is_last))

    def promote(self) -> None:
        """Move to the next stage, or to the next canary step, on the operator's request."""
        match self.stage:
            case Stage.OFF | Stage.HELD:
                self.move(Stage.SHADOW, "by hand")
            case Stage.SHADOW:
                self.move(Stage.VERIFY, "by hand")
            case Stage.VERIFY:
                self.move(Stage.CANARY, "by hand")
            case Stage.CANARY:
                stage, step = self._after_canary_step()
                self.move(stage, "by hand", step)

    def _promote(self, stage: Stage, step: int, reason: str) -> None:
        """Move to a stage, or wait for the operator if the rule says `manual`."""
        if self.rule.promote == "auto":
            self.move(stage, reason, step)
        else:
            self.is_ready, self.reason = True, f"ready: {reason}"
