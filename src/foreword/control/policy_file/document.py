"""Data classes for the contents of a policy file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from foreword.control.policy_file.matching import Match, RequestTraits
from foreword.control.service import DEFAULT_SERVICE, Service, Slo
from foreword.control.settings import ControlSettings

OTHER = "other"
"""Cohort of requests that no rule matches."""

REMOTE = "remote"
"""The method that sends texts to draft nodes."""

STATES = ("on", "off")
"""States of a cohort: whether its requests may use drafters."""


class Stage(StrEnum):
    """Roll-out stage of a drafter."""

    OFF = "off"
    SHADOW = "shadow"  # drafts are only compared with the text
    VERIFY = "verify"  # ended requests are decoded again with the drafter; clients get no such answer
    CANARY = "canary"  # a fraction of requests uses the drafter
    ON = "on"
    HELD = "held"  # rolled back; stays off until the operator or a new salt restarts the roll-out


STARTS = ("shadow", "verify", "canary", "on")
"""Stages in which a roll-out may start."""


@dataclass(frozen=True)
class DrafterRule:
    """A drafter that cohort rules refer to by name."""

    name: str
    config: Mapping[str, Any]  # JSON object that `SpeculationConfig` parses
    price_per_hour: float | None = None  # price of the drafter's device; None: `Prices.draft`


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
    """Limits of a canary. Without another unit, a limit is a ratio to the requests without the drafter."""

    gain: float = 0.99  # minimum speed, as ratio to plain decoding
    tpot_p95: float = 1.05  # maximum 95th percentile of the time per output token
    ttft_p95: float = 1.10  # maximum 95th percentile of the time to first token
    error_points: float = 0.1  # maximum increase of the error rate, in percentage points
    preemptions: float = 1.2  # maximum preemptions per pass
    cost_per_million: float = 1.0  # maximum cost per million tokens
    fault_share: float = 0.01  # maximum fraction of draft requests that fail
    memory_bytes: float | None = None  # maximum bytes that the drafter reports; None: no limit


@dataclass(frozen=True)
class RolloutRule:
    """Settings of a drafter's roll-out to a cohort."""

    drafter: str
    cohort: str
    start: str = "shadow"
    promote: str = "auto"  # or "manual": every promotion waits for the operator
    salt: str = ""  # hashed with the request id to select the canary; a new salt restarts the roll-out
    steps: tuple[float, ...] = (1, 5, 25, 100)  # percentages of requests in the canary
    # Minimum requests and passes before the next canary step, each with the drafter and without it.
    min_requests: int = 200
    min_passes: int = 20_000
    verify_samples: int = 200  # requests decoded again in the verify stage
    min_levels: int = 2_000  # draft levels compared with the text in the shadow stage
    guards: Guards = Guards()


@dataclass(frozen=True)
class LatencyRule:
    """Latency limit: a step that drafts and includes a matching request may take at most `tpot_ms`."""

    name: str
    match: Match
    tpot_ms: float  # milliseconds


@dataclass(frozen=True)
class ServiceClass:
    """Requests with the same service objective."""

    name: str
    slo: Slo
    match: Match
    tpot_ms: float | None = None  # latency class: maximum step time in milliseconds; None: another class


@dataclass(frozen=True)
class ServiceRules:
    """Service classes and tenant weights."""

    classes: tuple[ServiceClass, ...] = ()
    shares: tuple[tuple[str, float], ...] = ()  # (tenant pattern with * and ?, weight)
    ageing_seconds: float = DEFAULT_SERVICE.ageing_seconds

    def of(self, traits: RequestTraits) -> Service:
        """Return the service of a request: its first matching class, and the weight of its first matching tenant."""
        service_class = next((rule for rule in self.classes if rule.match.fits(traits)), None)
        weights = (weight for pattern, weight in self.shares if fnmatchcase(traits.tenant, pattern))
        weight = next(weights, DEFAULT_SERVICE.weight)
        if service_class is None:
            return Service(ageing_seconds=self.ageing_seconds, weight=weight)
        limit = None if service_class.tpot_ms is None else service_class.tpot_ms / 1e3
        return Service(service_class.name, service_class.slo, limit, self.ageing_seconds, weight)


@dataclass(frozen=True)
class OverloadRule:
    """Load at which the listed drafters pause: either limit is reached."""

    queue: int = 1  # waiting requests
    kv_usage: float = 0.9  # fraction of KV pages in use
    stop: tuple[str, ...] = ()  # names or methods of the drafters that pause


@dataclass(frozen=True)
class Prices:
    """Device prices per hour, in any currency."""

    target: float
    draft: float = 0.0


@dataclass(frozen=True)
class PolicyFile:
    """A parsed policy file."""

    state: str = "on"  # state of cohorts that set none
    max_depth: int | None = None  # maximum depth of cohorts that set none; None: no limit
    max_draft_share: float | None = None
    settings: ControlSettings = field(default_factory=ControlSettings)
    drafters: Mapping[str, DrafterRule] = field(default_factory=dict)
    cohorts: Sequence[CohortRule] = ()
    split: tuple[str, ...] = ("temperature_band",)  # traits by which a cohort's estimates are separated
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
        if service_limit is not None:
            limits.append(service_limit)
        return min(limits, default=None)

    def rollout(self, drafter: str, cohort: str) -> RolloutRule | None:
        """Return the roll-out rule of a drafter in a cohort; None: it has none."""
        matching = (rule for rule in self.rollouts if (rule.drafter, rule.cohort) == (drafter, cohort))
        return next(matching, None)

    def permitted_methods(
        self, rule: CohortRule, requested: Sequence[str], methods_of: Callable[[str], Sequence[str]]
    ) -> list[str]:
        """Return the requested methods that the cohort permits; `methods_of` returns the methods of a drafter's name.

        If the cohort names drafters and none of them uses draft nodes, `remote` is removed: a request may not override
        the operator's choice to keep texts on this machine.
        """
        rolled_out = [rollout.drafter for rollout in self.rollouts if rollout.cohort == rule.name]
        if rule.drafters is None or any(REMOTE in methods_of(name) for name in (*rule.drafters, *rolled_out)):
            return list(requested)
        return [method for method in requested if method != REMOTE]
