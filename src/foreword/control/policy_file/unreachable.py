"""Finds rules of a policy file that no request can match."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foreword.control.policy_file.document import OTHER, PolicyFile
from foreword.control.policy_file.matching import Condition, Match
from foreword.control.policy_file.regions import Region, impossible, region_of, without

MOST_REGIONS = 256
"""Maximum parts into which earlier rules may split a later one; beyond that it counts as reachable."""

TENANT_DIGITS = 32
"""Length of a server's tenant names: hexadecimal digits of a hash of the API key."""

_Rules = Sequence[tuple[str, Match]]  # place in the file, and its match


@dataclass(frozen=True)
class Findings:
    """Unreachable rules, one line each."""

    errors: list[str]  # rules that contradict themselves
    warnings: list[str]  # rules shadowed by earlier ones, or for tenants that a server cannot have


def unreachable(policy: PolicyFile) -> Findings:
    """Return the rules that no request can match, and why."""
    cohorts = [(f"cohorts[{place}] {rule.name!r}", rule.match) for place, rule in enumerate(policy.cohorts)]
    classes = [(f"service.classes.{one.name}", one.match) for one in policy.service.classes]
    limits = [(f"latency.{rule.name}", rule.match) for rule in policy.latency]
    shares = [
        (f"service.shares.{tenant}", Match((Condition("tenant", texts=(tenant,)),)))
        for tenant, _ in policy.service.shares
    ]
    everything = (*cohorts, *classes, *shares, *limits)
    errors = [line for place, match in everything for line in _contradiction(place, match)]
    warnings = [line for rules in (cohorts, classes, shares) for line in _shadowed(rules)]
    warnings += [line for place, match in everything for line in _unknown_tenant(place, match)]
    return Findings(errors, warnings + list(_rollouts_of_other(policy, cohorts)))


def _contradiction(place: str, match: Match) -> Iterator[str]:
    if (one := impossible(region_of(match))) is not None:
        wanted = next(given.wanted for given in match.conditions if given.key == one.key)
        yield f"{place} can never match: no request has a {one.key} of {wanted or 'an empty text'}"


def _shadowed(rules: _Rules) -> Iterator[str]:
    """Yield rules shadowed by earlier ones, if the first match wins."""
    for number, (place, match) in enumerate(rules):
        own, before = region_of(match), rules[:number]
        if impossible(own) is not None:
            continue
        takers = _takers(own, before)
        if takers:
            verb = "matches" if len(takers) == 1 else "together match"
            yield f"{place} can never match: {' and '.join(takers)} before it {verb} every request that it matches"


def _takers(region: Region, rules: _Rules) -> list[str]:
    """Return the earlier rules that cover a region, or none if something is left."""
    alone = next((place for place, match in rules if not without(region, match)), None)
    if alone is not None:
        return [alone]
    left, takers = [region], []
    for place, match in rules:
        rest = [part for one in left for part in without(one, match)]
        if rest != left:
            takers.append(place)
        left = rest
        if not left:
            return takers
        if len(left) > MOST_REGIONS:
            return []
    return []


def _unknown_tenant(place: str, match: Match) -> Iterator[str]:
    for one in match.conditions:
        if one.key == "tenant" and not any(map(_can_be_hash, one.texts)):
            yield (
                f"{place} matches no request to a server: tenants are hashes of API keys there, and "
                f"{one.wanted} is none; see foreword policy tenant"
            )


def _can_be_hash(pattern: str) -> bool:
    """Whether a server can have such a tenant; an empty tenant is that of a server without API keys."""
    fixed = pattern.replace("*", "")
    if not pattern or "[" in pattern:
        return True
    fits = len(fixed) <= TENANT_DIGITS if "*" in pattern else len(fixed) == TENANT_DIGITS
    return fits and set(fixed) <= set("0123456789abcdef?")


def _rollouts_of_other(policy: PolicyFile, cohorts: _Rules) -> Iterator[str]:
    """Yield roll-outs for unmatched requests if cohorts match every request."""
    takers = _takers({}, cohorts)
    for number, rule in enumerate(policy.rollouts):
        if rule.cohort == OTHER and takers:
            every = (
                f"{' and '.join(takers)} {'matches' if len(takers) == 1 else 'together match'} every request"
            )
            yield f"rollout[{number}] can never start: {every}, and none is left for {OTHER!r}"
