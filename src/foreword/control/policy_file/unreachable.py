"""Finds rules of a policy file that no request can match."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foreword.control.policy_file.document import OTHER, PolicyFile
from foreword.control.policy_file.matching import Condition, Match
from foreword.control.policy_file.regions import Region, difference, impossible_condition, region_of

MOST_REGIONS = 256
"""Maximum number of regions into which earlier rules may split a later one. A rule in more regions counts as
reachable."""

TENANT_DIGITS = 32
"""Number of hexadecimal digits in a server's tenant names, which are hashes of API keys."""

_Rules = Sequence[tuple[str, Match]]
"""(path of a rule in the file, its match)."""


@dataclass(frozen=True)
class Findings:
    """Messages about unreachable rules, one message per rule."""

    errors: list[str]  # rules that contradict themselves
    warnings: list[str]  # rules shadowed by earlier ones, or for tenants that a server cannot have


def unreachable(policy: PolicyFile) -> Findings:
    """Return messages about the rules that no request can match, and why."""
    cohorts = [(f"cohorts[{index}] {rule.name!r}", rule.match) for index, rule in enumerate(policy.cohorts)]
    classes = [(f"service.classes.{rule.name}", rule.match) for rule in policy.service.classes]
    limits = [(f"latency.{rule.name}", rule.match) for rule in policy.latency]
    shares = [
        (f"service.shares.{tenant}", Match((Condition("tenant", texts=(tenant,)),)))
        for tenant, _ in policy.service.shares
    ]
    all_rules = (*cohorts, *classes, *shares, *limits)
    errors = [line for path, match in all_rules for line in _contradiction(path, match)]
    warnings = [line for rules in (cohorts, classes, shares) for line in _shadowed(rules)]
    warnings += [line for path, match in all_rules for line in _unknown_tenant(path, match)]
    return Findings(errors, warnings + list(_rollouts_of_other(policy, cohorts)))


def _contradiction(path: str, match: Match) -> Iterator[str]:
    """Yield a message if a rule's conditions contradict each other, or the values that requests can have."""
    if (impossible := impossible_condition(region_of(match))) is not None:
        # The region's condition was restricted; the message shows the one in the file.
        wanted = next(condition.wanted for condition in match.conditions if condition.key == impossible.key)
        yield f"{path} can never match: no request has a {impossible.key} of {wanted or 'an empty text'}"


def _shadowed(rules: _Rules) -> Iterator[str]:
    """Yield messages about rules that earlier rules shadow: the first match wins."""
    for index, (path, match) in enumerate(rules):
        region = region_of(match)
        if impossible_condition(region) is not None:
            continue
        covering = _covering_rules(region, rules[:index])
        if covering:
            verb = "matches" if len(covering) == 1 else "together match"
            yield f"{path} can never match: {' and '.join(covering)} before it {verb} every request that it matches"


def _covering_rules(region: Region, rules: _Rules) -> list[str]:
    """Return the paths of rules that together match all of a region; empty if they may leave some of it."""
    single = next((path for path, match in rules if not difference(region, match)), None)
    if single is not None:
        return [single]
    left, covering = [region], []
    for path, match in rules:
        rest = [part for uncovered in left for part in difference(uncovered, match)]
        if rest != left:
            covering.append(path)
        left = rest
        if not left:
            return covering
        if len(left) > MOST_REGIONS:
            return []
    return []


def _unknown_tenant(path: str, match: Match) -> Iterator[str]:
    """Yield a message if a rule names a tenant that a server cannot have."""
    for condition in match.conditions:
        if condition.key == "tenant" and not any(map(_can_be_hash, condition.texts)):
            yield (
                f"{path} matches no request to a server: tenants are hashes of API keys there, and "
                f"{condition.wanted} is none; see foreword policy tenant"
            )


def _can_be_hash(pattern: str) -> bool:
    """Whether a server can have a tenant of this pattern."""
    if not pattern or "[" in pattern:  # a server without API keys has the empty tenant; sets are not analysed
        return True
    digits = pattern.replace("*", "")
    has_length = len(digits) <= TENANT_DIGITS if "*" in pattern else len(digits) == TENANT_DIGITS
    return has_length and set(digits) <= set("0123456789abcdef?")


def _rollouts_of_other(policy: PolicyFile, cohorts: _Rules) -> Iterator[str]:
    """Yield messages about roll-outs to the cohort `other` if the other cohorts match every request."""
    covering = _covering_rules({}, cohorts)
    for index, rule in enumerate(policy.rollouts):
        if rule.cohort == OTHER and covering:
            verb = "matches" if len(covering) == 1 else "together match"
            every = f"{' and '.join(covering)} {verb} every request"
            yield f"rollout[{index}] can never start: {every}, and none is left for {OTHER!r}"
