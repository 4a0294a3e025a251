"""Contents of a policy file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from foreword.control.policy_file.matching import Match, RequestTraits
from foreword.control.policy_file.service_rules import ServiceRules
from foreword.control.settings import ControlSettings

OTHER = "other"
"""Cohort of requests that no rule matches."""

STATES = ("on", "off")


class Stage(StrEnum):
    """Roll-out stage of a drafter."""

    OFF = "off"
    SHADOW = "shadow"  # drafts are compared with the text
    VERIFY = "verify"  # ended requests are decoded again with it, not served
    CANARY = "canary"  # a fraction of requests uses it
    ON = "on"
    HELD = "held"  # rolled back


STARTS = ("shadow", "verify", "canary")


@dataclass(frozen=True)
class DrafterRule:
    """A drafter that cohorts may name."""

    name: str
    config: Mapping[str, Any]  # parsed by `SpeculationConfig`
    price_per_hour: float | None = None  # of its device; None: the file's price for drafting


@dataclass(frozen=True)
class CohortRule:
    """A cohort: requests that are treated alike."""

    name: str
    match: Match = field(default_factory=Match)
    drafters: tuple[str, ...] | None = None  # names; None: the engine's default
    state: str | None = None  # None: the file's default
    max_depth: int | None = None


@dataclass(frozen=True)
class Guards:
    """Limits of a canary, as ratios to the control arm unless noted."""

    gain: float = 0.99  # minimum ratio to plain decoding
    tpot_p95: float = 1.05
    ttft_p95: float = 1.10
    error_points: float = 0.1  # maximum percentage points above the control arm
    preemptions: float = 1.2
    cost_per_million: float = 1.0
    fault_share: float = 0.01  # of draft requests
    memory_bytes: float | None = None  # maximum memory that the drafter reports; None: no limit


@dataclass(frozen=True)
class RolloutRule:
    """Settings of a drafter's roll-out to a cohort."""

    drafter: str
    cohort: str
    start: str = "shadow"
    promote: str = "auto"  # or "manual": every move waits for the operator
    salt: str = ""
    steps: tuple[float, ...] = (1, 5, 25, 100)  # percentages of requests
    min_requests: int = 200  # per arm and step
    min_passes: int = 20_000
    verify_samples: int = 200
    min_levels: int = 2_000  # judged in the shadow stage
    guards: Guards = Guards()


@dataclass(frozen=True)
class LatencyRule:
    """Limit on steps with drafts that serve matching requests."""

    name: str
    match: Match
    tpot_ms: float


@dataclass(frozen=True)
class OverloadRule:
    """Load above which these drafters pause."""

    queue: int = 1  # waiting requests
    kv_usage: float = 0.9
    stop: tuple[str, ...] = ()  # drafters by name or by method


@dataclass(frozen=True)
class Prices:
    """Device prices per hour, in any currency."""

    target: float
    draft: float = 0.0


@dataclass(frozen=True)
class PolicyFile:
    """A parsed policy file."""

    state: str = "on"
    max_depth: int | None = None
    max_draft_share: float | None = None
    settings: ControlSettings = field(default_factory=ControlSettings)
    drafters: Mapping[str, DrafterRule] = field(default_factory=dict)
    cohorts: Sequence[CohortRule] = ()
    split: tuple[str, ...] = ("temperature_band",)
    max_cohorts: int = 64
    rollouts: tuple[RolloutRule, ...] = ()
    latency: tuple[LatencyRule, ...] = ()
    service: ServiceRules = field(default_factory=ServiceRules)
    overload: OverloadRule | None = None
    prices: Prices | None = None
    state_file: str | None = None

    def cohort(self, traits: RequestTraits) -> CohortRule:
        """Return the first matching rule."""
        return next((rule for rule in self.cohorts if rule.match.fits(traits)), CohortRule(OTHER))

    def label(self, rule: CohortRule, traits: RequestTraits) -> str:
        """Return the label under which requests are counted and decided about."""
        parts = [str(traits.value(part)) for part in self.split]
        return "/".join([rule.name, *(part for part in parts if part)])

    def is_on(self, rule: CohortRule) -> bool:
        return (rule.state or self.state) == "on"

    def depth(self, rule: CohortRule) -> int | None:
        return self.max_depth if rule.max_depth is None else rule.max_depth

    def step_limit(self, traits: RequestTraits) -> float | None:
        """Return the step limit of this request in seconds; None: no limit."""
        limits = [rule.tpot_ms / 1e3 for rule in self.latency if rule.match.fits(traits)]
        promised = self.service.of(traits).step_seconds
        return min([*limits, *([] if promised is None else [promised])], default=None)

    def rollout(self, drafter: str, cohort: str) -> RolloutRule | None:
        found = (rule for rule in self.rollouts if (rule.drafter, rule.cohort) == (drafter, cohort))
        return next(found, None)
