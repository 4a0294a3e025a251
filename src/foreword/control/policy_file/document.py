"""Data classes for the contents of a policy file."""

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
    VERIFY = "verify"  # ended requests are decoded again with it; clients get no such answer
    CANARY = "canary"  # a fraction of requests uses it
    ON = "on"
    HELD = "held"  # rolled back; stays off until the operator or a new salt restarts it


STARTS = ("shadow", "verify", "canary")
"""Stages in which a roll-out may start."""


@dataclass(frozen=True)
class DrafterRule:
    """A drafter that cohort rules refer to by name."""

    name: str
    config: Mapping[str, Any]  # parsed by `SpeculationConfig`
    price_per_hour: float | None = None  # of its device; None: `Prices.draft`


@dataclass(frozen=True)
class CohortRule:
    """A cohort: requests with the same drafters and limits."""

    name: str
    match: Match = field(default_factory=Match)
    drafters: tuple[str, ...] | None = None  # names; None: the engine's default drafters
    state: str | None = None  # on or off; None: `PolicyFile.state`
    max_depth: int | None = None  # None: `PolicyFile.max_depth`


@dataclass(frozen=True)
class Guards:
    """Limits of a canary, as ratios to the control arm unless noted."""

    gain: float = 0.99  # minimum speed, as ratio to plain decoding
    tpot_p95: float = 1.05  # maximum 95th percentile of the time per output token
    ttft_p95: float = 1.10  # maximum 95th percentile of the time to first token
    error_points: float = 0.1  # maximum percentage points above the control arm
    preemptions: float = 1.2  # maximum preemptions per pass
    cost_per_million: float = 1.0  # maximum cost per million tokens
    fault_share: float = 0.01  # maximum fraction of draft requests that fail; no ratio
    memory_bytes: float | None = None  # maximum memory that the drafter reports; None: no limit


@dataclass(frozen=True)
class RolloutRule:
    """Settings of a drafter's roll-out to a cohort."""

    drafter: str
    cohort: str
    start: str = "shadow"
    promote: str = "auto"  # or "manual": every promotion waits for the operator
    salt: str = ""  # hashed with the request id to select the canary; a new salt restarts the roll-out
    steps: tuple[float, ...] = (1, 5, 25, 100)  # percentages of requests in the canary
    min_requests: int = 200  # per arm and canary step
    min_passes: int = 20_000  # per arm and canary step
    verify_samples: int = 200  # requests decoded again in the verify stage
    min_levels: int = 2_000  # draft levels compared with the text in the shadow stage
    guards: Guards = Guards()


@dataclass(frozen=True)
class LatencyRule:
    """Maximum time of a step that drafts and includes a matching request."""

    name: str
    match: Match
    tpot_ms: float


@dataclass(frozen=True)
class OverloadRule:
    """Load from which on the listed drafters pause."""

    queue: int = 1  # waiting requests
    kv_usage: float = 0.9  # fraction of KV pages in use
    stop: tuple[str, ...] = ()  # drafters by name or by method


@dataclass(frozen=True)
class Prices:
    """Device prices per hour, in any currency."""

    target: float
    draft: float = 0.0


@dataclass(frozen=True)
class PolicyFile:
    """A parsed policy file."""

    state: str = "on"  # of cohorts without a state
    max_depth: int | None = None  # of cohorts without a maximum depth; None: no limit
    max_draft_share: float | None = None
    settings: ControlSettings = field(default_factory=ControlSettings)
    drafters: Mapping[str, DrafterRule] = field(default_factory=dict)
    cohorts: Sequence[CohortRule] = ()
    split: tuple[str, ...] = ("temperature_band",)  # traits by which each cohort has estimates of its own
    max_cohorts: int = 64
    rollouts: tuple[RolloutRule, ...] = ()
    latency: tuple[LatencyRule, ...] = ()
    service: ServiceRules = field(default_factory=ServiceRules)
    overload: OverloadRule | None = None
    prices: Prices | None = None
    state_file: str | None = None  # saves the roll-outs; relative to the policy file

    def cohort(self, traits: RequestTraits) -> CohortRule:
        """Return the first matching rule, or the rule `other` if none matches."""
        return next((rule for rule in self.cohorts if rule.match.fits(traits)), CohortRule(OTHER))

    def label(self, rule: CohortRule, traits: RequestTraits) -> str:
        """Return the cohort name for statistics and decisions: the rule's name and the traits of `split`."""
        values = [str(traits.value(key)) for key in self.split]
        return "/".join([rule.name, *filter(None, values)])

    def is_on(self, rule: CohortRule) -> bool:
        return (rule.state or self.state) == "on"

    def depth(self, rule: CohortRule) -> int | None:
        return self.max_depth if rule.max_depth is None else rule.max_depth

    def step_limit(self, traits: RequestTraits) -> float | None:
        """Return the step limit of this request in seconds; None: no limit."""
        limits = [rule.tpot_ms / 1e3 for rule in self.latency if rule.match.fits(traits)]
        service_limit = self.service.of(traits).step_seconds
        return min([*limits, *([] if service_limit is None else [service_limit])], default=None)

    def rollout(self, drafter: str, cohort: str) -> RolloutRule | None:
        """Return the roll-out rule of a drafter in a cohort."""
        matching = (rule for rule in self.rollouts if (rule.drafter, rule.cohort) == (drafter, cohort))
        return next(matching, None)
