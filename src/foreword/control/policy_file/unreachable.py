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
"""Length of a server's tenant names: hexadecimal digits of a hash of the API key."""

_Rules = Sequence[tuple[str, Match]]  # path in the file, and the match


@dataclass(frozen=True)
class Findings:
    """Messages about unreachable rules, one for each."""

    errors: list[str]  # rules that contradict themselves
    warnings: list[str]  # rules shadowed by earlier ones, or for tenants that a server cannot have


def unreachable(policy: PolicyFile) -> Findings:
    """Return messages about the rules that no request can match, and why."""
    cohorts = [(f"cohorts[{index}] {rule.name!r}", rule.match) for index, rule in enumerate(policy.cohorts)]
    classes = [(f"service.classes.{one.name}", one.match) for one in policy.service.classes]
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
    if (one := impossible_condition(region_of(match))) is not None:
        wanted = next(given.wanted for given in match.conditions if given.key == one.key)
        yield f"{path} can never match: no request has a {one.key} of {wanted or 'an empty text'}"


def _shadowed(rules: _Rules) -> Iterator[str]:
    """Yield messages about rules that earlier ones shadow; the first match wins."""
    for index, (path, match) in enumerate(rules):
        region, earlier = region_of(match), rules[:index]
        if impossible_condition(region) is not None:
            continue
        covering = _covering_rules(region, earlier)
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
        rest = [part for whole in left for part in difference(whole, match)]
        if rest != left:
            covering.append(path)
        left = rest
        if not left:
            return covering
        if len(left) > MOST_REGIONS:
            return []
    return []


def _unknown_tenant(path: str, match: Match) -> Iterator[str]:
    for one in match.conditions:
        if one.key == "tenant" and not any(map(_can_be_hash, one.texts)):
            yield (
                f"{path} matches no request to a server: tenants are hashes of API keys there, and "
                f"{one.wanted} is none; see foreword policy tenant"
            )


def _can_be_hash(pattern: str) -> bool:
    """Whether a server can have a tenant of this pattern. A server without API keys has the empty tenant."""
    without_stars = pattern.replace("*", "")
    if not pattern or "[" in pattern:
        return True
    fits = len(without_stars) <= TENANT_DIGITS if "*" in pattern else len(without_stars) == TENANT_DIGITS
    return fits and set(without_stars) <= set("0123456789abcdef?")


def _rollouts_of_other(policy: PolicyFile, cohorts: _Rules) -> Iterator[str]:
    """Yield messages about roll-outs to the cohort `other` if the other cohorts match every request."""
    covering = _covering_rules({}, cohorts)
    for index, rule in enumerate(policy.rollouts):
        if rule.cohort == OTHER and covering:
            every = f"{' and '.join(covering)} {'matches' if len(covering) == 1 else 'together match'} every request"
            yield f"rollout[{index}] can never start: {every}, and none is left for {OTHER!r}"
