"""Explains what a policy file does with one request."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foreword.control.policy_file.document import CohortRule, PolicyFile
from foreword.control.policy_file.matching import RequestTraits
from foreword.control.policy_file.nodes import methods_within

ENGINES_OWN = "the engine's own"


@dataclass(frozen=True)
class Explanation:
    """The matching rule, the drafters, and the reasons."""

    cohort: str
    label: str
    reason: str
    passed_over: Mapping[str, str]  # earlier rules, and the condition that fails
    drafters: Mapping[str, str]  # and the purpose of each
    max_depth: int | None
    step_limit_ms: float | None
    service: str  # service class
    weight: float  # of the tenant

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(policy: PolicyFile, traits: RequestTraits, wish: object = None) -> Explanation:
    """Explain the treatment of a request; `wish` is its own `speculation` setting."""
    rule = policy.cohort(traits)
    passed = {}
    for other in policy.cohorts:
        if other is rule:
            break
        failed = other.match.why_not(traits)
        assert failed is not None
        has = traits.value(failed.key)
        passed[other.name] = f"{failed.key} is {'not given' if has is None else has}, not {failed.wanted}"
    limit, service = policy.step_limit(traits), policy.service.of(traits)
    return Explanation(
        rule.name,
        policy.label(rule, traits),
        _reason(policy, rule),
        passed,
        _drafters(policy, rule, wish),
        policy.depth(rule),
        None if limit is None else 1e3 * limit,
        service.name,
        service.weight,
    )


def _reason(policy: PolicyFile, rule: CohortRule) -> str:
    if rule not in policy.cohorts:
        return "no rule fits"
    fits = [f"{one.key} is {one.wanted}" for one in rule.match.conditions]
    return "the first rule that fits: " + (", ".join(fits) or "it is for everybody")


def _drafters(policy: PolicyFile, rule: CohortRule, wish: object) -> dict[str, str]:
    if wish is False:
        return {"none": "the request turns speculation off, and that always wins"}
    if not policy.is_on(rule):
        return {"none": "the cohort is off, whatever requests ask for"}
    if wish is not None and wish is not True:
        return _requested_drafter(policy, rule, _name(wish))
    named = rule.drafters or ()
    rolled = [one.drafter for one in policy.rollouts if one.cohort == rule.name]
    reported = {name: "used where it is measured to pay" for name in named if name not in rolled}
    for name in rolled:
        found = policy.rollout(name, rule.name)
        assert found is not None
        steps = ", ".join(f"{step:g}" for step in found.steps)
        reported[name] = f"rolled out from {found.start} on, then {steps}% of the requests"
    if rule.drafters is None and not rolled:
        return {ENGINES_OWN: "the rule names no drafters"}
    return reported or {"none": "the rule's list of drafters is empty"}


def _requested_drafter(policy: PolicyFile, rule: CohortRule, name: str) -> dict[str, str]:
    names = name.split("+")
    rest = methods_within(policy, rule, names, lambda one: _name(policy.drafters[one].config).split("+"))
    if rest != names:
        why = "the request names draft nodes, and none of the cohort's drafters uses nodes"
        return {"+".join(rest) or "none": why}
    return {name: "the request names it; its depth is an upper limit"}


def _name(wish: object) -> str:
    named = wish.get("method", ENGINES_OWN) if isinstance(wish, Mapping) else wish
    return "+".join(map(str, named)) if isinstance(named, list) else str(named)
