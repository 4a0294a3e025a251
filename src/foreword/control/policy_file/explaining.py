"""Explains what a policy file does with one request."""

from collections.abc import Mapping
from dataclasses import dataclass

from foreword.control.policy_file.document import CohortRule, PolicyFile
from foreword.control.policy_file.matching import RequestTraits

ENGINE_DEFAULT = "the engine's own"
"""Key of `Explanation.drafters` if the rule leaves the choice to the engine."""


@dataclass(frozen=True)
class Explanation:
    """How a policy file treats one request, and why."""

    cohort: str
    label: str  # cohort name for statistics and decisions
    reason: str  # why the request belongs to the cohort
    passed_over: Mapping[str, str]  # name of an earlier rule -> its condition that fails
    drafters: Mapping[str, str]  # drafter -> how it is used; "none" -> why there is none
    max_depth: int | None  # None: no limit
    step_limit_ms: float | None  # None: no limit
    service: str  # service class
    weight: float  # tenant's share of the engine, relative to the weights of others


def explain(policy: PolicyFile, traits: RequestTraits, requested: object = None) -> Explanation:
    """Return how the policy treats a request, and why; `requested` is the request's `speculation` field."""
    rule = policy.cohort(traits)
    passed_over = {}
    for earlier in policy.cohorts:
        if earlier is rule:
            break
        failed = earlier.match.first_failing(traits)
        assert failed is not None
        value = traits.value(failed.key)
        given = "not given" if value is None else value
        passed_over[earlier.name] = f"{failed.key} is {given}, not {failed.wanted}"
    limit, service = policy.step_limit(traits), policy.service.of(traits)
    return Explanation(
        rule.name,
        policy.label(rule, traits),
        _reason(policy, rule),
        passed_over,
        _drafters(policy, rule, requested),
        max_depth=policy.depth(rule),
        step_limit_ms=None if limit is None else 1e3 * limit,
        service=service.name,
        weight=service.weight,
    )


def _reason(policy: PolicyFile, rule: CohortRule) -> str:
    """Return why a request belongs to the cohort of this rule."""
    if rule not in policy.cohorts:
        return "no rule fits"
    conditions = [f"{condition.key} is {condition.wanted}" for condition in rule.match.conditions]
    return "the first rule that fits: " + (", ".join(conditions) or "it is for everybody")


def _drafters(policy: PolicyFile, rule: CohortRule, requested: object) -> dict[str, str]:
    """Return `Explanation.drafters`."""
    if requested is False:
        return {"none": "the request turns speculation off, and that always wins"}
    if not policy.is_on(rule):
        return {"none": "the cohort is off, whatever requests ask for"}
    if requested is not None and requested is not True:
        return _requested_drafter(policy, rule, _name(requested))
    rollouts = {rollout.drafter: rollout for rollout in policy.rollouts if rollout.cohort == rule.name}
    if rule.drafters is None and not rollouts:
        return {ENGINE_DEFAULT: "the rule names no drafters"}
    drafters = {name: "used where a gain is measured" for name in rule.drafters or () if name not in rollouts}
    for name, rollout in rollouts.items():
        steps = ", ".join(f"{step:g}" for step in rollout.steps)
        drafters[name] = f"rolled out from {rollout.start} on, then {steps}% of the requests"
    return drafters or {"none": "the rule's list of drafters is empty"}


def _requested_drafter(policy: PolicyFile, rule: CohortRule, name: str) -> dict[str, str]:
    """Return `Explanation.drafters` of a request that names its methods, joined by +."""

    def methods_of(drafter: str) -> list[str]:
        return _name(policy.drafters[drafter].config).split("+")

    methods = name.split("+")
    permitted = policy.permitted_methods(rule, methods, methods_of)
    if permitted != methods:
        reason = "the request names draft nodes, and none of the cohort's drafters uses nodes"
        return {"+".join(permitted) or "none": reason}
    return {name: "the request names it; its depth is an upper limit"}


def _name(config: object) -> str:
    """Return the methods of a drafter configuration, joined by +."""
    method = config.get("method", ENGINE_DEFAULT) if isinstance(config, Mapping) else config
    return "+".join(map(str, method)) if isinstance(method, list) else str(method)
