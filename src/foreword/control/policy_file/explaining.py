"""Explains what a policy file does with one request."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foreword.control.policy_file.document import CohortRule, PolicyFile
from foreword.control.policy_file.matching import RequestTraits
from foreword.control.policy_file.nodes import permitted_methods

ENGINE_DEFAULT = "the engine's own"
"""Key of `Explanation.drafters` if the rule leaves the choice to the engine."""


@dataclass(frozen=True)
class Explanation:
    """How a policy file treats one request, and why."""

    cohort: str
    label: str  # cohort name for statistics and decisions
    reason: str
    passed_over: Mapping[str, str]  # earlier rule -> its condition that fails
    drafters: Mapping[str, str]  # drafter -> how it is used; "none" -> why there is none
    max_depth: int | None
    step_limit_ms: float | None
    service: str  # service class
    weight: float  # tenant's share of the engine, relative to the weights of others

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(policy: PolicyFile, traits: RequestTraits, requested: object = None) -> Explanation:
    """Explain the treatment of a request; `requested` is its `speculation` field."""
    rule = policy.cohort(traits)
    passed_over = {}
    for earlier in policy.cohorts:
        if earlier is rule:
            break
        failed = earlier.match.first_failing(traits)
        assert failed is not None
        value = traits.value(failed.key)
        passed_over[earlier.name] = (
            f"{failed.key} is {'not given' if value is None else value}, not {failed.wanted}"
        )
    limit, service = policy.step_limit(traits), policy.service.of(traits)
    return Explanation(
        rule.name,
        policy.label(rule, traits),
        _reason(policy, rule),
        passed_over,
        _drafters(policy, rule, requested),
        policy.depth(rule),
        None if limit is None else 1e3 * limit,
        service.name,
        service.weight,
    )


def _reason(policy: PolicyFile, rule: CohortRule) -> str:
    if rule not in policy.cohorts:
        return "no rule fits"
    conditions = [f"{one.key} is {one.wanted}" for one in rule.match.conditions]
    return "the first rule that fits: " + (", ".join(conditions) or "it is for everybody")


def _drafters(policy: PolicyFile, rule: CohortRule, requested: object) -> dict[str, str]:
    if requested is False:
        return {"none": "the request turns speculation off, and that always wins"}
    if not policy.is_on(rule):
        return {"none": "the cohort is off, whatever requests ask for"}
    if requested is not None and requested is not True:
        return _requested_drafter(policy, rule, _name(requested))
    named = rule.drafters or ()
    rollouts = {one.drafter: one for one in policy.rollouts if one.cohort == rule.name}
    reported = {name: "used where it is measured to pay" for name in named if name not in rollouts}
    for name, rollout in rollouts.items():
        steps = ", ".join(f"{step:g}" for step in rollout.steps)
        reported[name] = f"rolled out from {rollout.start} on, then {steps}% of the requests"
    if rule.drafters is None and not rollouts:
        return {ENGINE_DEFAULT: "the rule names no drafters"}
    return reported or {"none": "the rule's list of drafters is empty"}


def _requested_drafter(policy: PolicyFile, rule: CohortRule, name: str) -> dict[str, str]:
    methods = name.split("+")
    permitted = permitted_methods(
        policy, rule, methods, lambda drafter: _name(policy.drafters[drafter].config).split("+")
    )
    if permitted != methods:
        reason = "the request names draft nodes, and none of the cohort's drafters uses nodes"
        return {"+".join(permitted) or "none": reason}
    return {name: "the request names it; its depth is an upper limit"}


def _name(config: object) -> str:
    """Return the methods of a drafter configuration, joined by +."""
    method = config.get("method", ENGINE_DEFAULT) if isinstance(config, Mapping) else config
    return "+".join(map(str, method)) if isinstance(method, list) else str(method)
