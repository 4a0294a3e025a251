"""Guards of a roll-out: conditions on a drafter, and on the arms of its canary, that require a rollback."""

from dataclasses import dataclass, field

from foreword.control.policy_file.document import Guards
from foreword.control.reporting.figures import Bounds
from foreword.control.rollout.evidence import Z_5_PERCENT, TrialArm, is_improbable, quantile_bounds

LEAST_FAULTS = 3
"""Minimum number of faults before their fraction is compared with the limit."""


@dataclass(frozen=True)
class DrafterHealth:
    """Behaviour of the drafter since its stage began."""

    draft_requests: int = 0
    faults: int = 0
    memory_bytes: int | None = None
    gain: Bounds | None = None  # measured; None: too few measurements
    # Number of times that the policy's own guard turned the drafter off, which resets the measurement of the gain.
    trips: int = 0


@dataclass
class Arms:
    """Both arms of a canary."""

    canary: TrialArm = field(default_factory=TrialArm)
    control: TrialArm = field(default_factory=TrialArm)


def reason_to_stop(health: DrafterHealth, guards: Guards) -> str | None:
    """Return why a drafter must be turned off, beginning with the guard's name; None: it may stay on."""
    faults, allowed_faults = health.faults, guards.fault_share * health.draft_requests
    if faults >= LEAST_FAULTS and faults > allowed_faults and is_improbable(faults, allowed_faults):
        return (
            f"faults: {faults} of {health.draft_requests} draft requests, more than {guards.fault_share:.1%}"
        )
    memory = health.memory_bytes
    if guards.memory_bytes is not None and memory is not None and memory > guards.memory_bytes:
        return f"memory: the drafter holds {memory / 1e6:.0f} MB, more than {guards.memory_bytes / 1e6:.0f}"
    gain = health.gain
    if gain is not None and gain.high < guards.gain:
        return f"gain: {gain.mean:.3f} of plain decoding, at most {gain.high:.3f}, below {guards.gain:g}"
    return f"gain: the guard tripped {health.trips} times" if health.trips else None


def reason_to_roll_back(arms: Arms, guards: Guards) -> str | None:
    """Return why the requests of both arms require a rollback; None: no guard is significantly broken."""
    canary, control = arms.canary, arms.control
    return (
        _errors(canary, control, guards)
        or _preemptions(canary, control, guards)
        or _slower("tpot", "TPOT p95", canary, control, guards.tpot_p95)
        or _slower("ttft", "TTFT p95", canary, control, guards.ttft_p95)
        or _more_expensive(canary, control, guards)
    )


# Each check returns why it requires a rollback; None: it does not.


def _errors(canary: TrialArm, control: TrialArm, guards: Guards) -> str | None:
    control_rate = control.errors / control.requests if control.requests else 0.0
    allowed = canary.requests * (control_rate + guards.error_points / 100)
    if not is_improbable(canary.errors, allowed):
        return None
    return f"errors: {canary.errors} of {canary.requests} requests, {control.errors} of {control.requests} without"


def _preemptions(canary: TrialArm, control: TrialArm, guards: Guards) -> str | None:
    """Compare preemptions per pass, since faster requests are in the engine for less time."""
    if not control.passes:
        return None
    control_rate = max(control.preemptions, 1) / control.passes  # zero preemptions may be chance
    if not is_improbable(canary.preemptions, guards.preemptions * control_rate * canary.passes):
        return None
    return (
        f"preemptions: {canary.preemptions} in {canary.passes} passes, "
        f"{control.preemptions} in {control.passes} without"
    )


def _slower(attribute: str, name: str, canary: TrialArm, control: TrialArm, max_ratio: float) -> str | None:
    """Compare the 95th percentiles of an attribute; `max_ratio` is that of canary to control arm."""
    canary_bounds = quantile_bounds(getattr(canary, attribute))
    control_bounds = quantile_bounds(getattr(control, attribute))
    if canary_bounds is None or control_bounds is None:
        return None
    lowest, control_highest = canary_bounds[0], control_bounds[1]  # seconds
    if lowest <= max_ratio * control_highest:
        return None
    return f"{name}: at least {1e3 * lowest:.1f} ms, at most {1e3 * control_highest:.1f} ms without"


def _more_expensive(canary: TrialArm, control: TrialArm, guards: Guards) -> str | None:
    cost, control_cost = canary.cost_per_token, control.cost_per_token
    lowest = cost.mean - Z_5_PERCENT * cost.error
    limit = guards.cost_per_million * (control_cost.mean + Z_5_PERCENT * control_cost.error)
    if not control_cost.mean or not lowest > limit:  # also if an error is infinite
        return None
    ratio = cost.mean / control_cost.mean
    return f"cost: {ratio:.2f} times as much per token, more than {guards.cost_per_million:g}"
