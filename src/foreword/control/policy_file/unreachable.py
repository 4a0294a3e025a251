"""Finds rules of a policy file that no request can match, by computing with sets of requests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import ceil

from foreword.control.policy_file.document import OTHER, PolicyFile
from foreword.control.policy_file.matching import FLAGS, METADATA, RANGES, Condition, Match

_Region = Mapping[str, Condition]
"""The set of requests that satisfy a condition for each of some keys; other keys are unrestricted."""

_LEAST = {"temperature": 0, "prompt_tokens": 1}  # smallest value that a request can have
_WILDCARDS = frozenset("*?[")  # of `fnmatch`

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
    if (impossible := _impossible_condition(_region_of(match))) is not None:
        # The region's condition was restricted; the message shows the one in the file.
        wanted = next(condition.wanted for condition in match.conditions if condition.key == impossible.key)
        yield f"{path} can never match: no request has a {impossible.key} of {wanted or 'an empty text'}"


def _shadowed(rules: _Rules) -> Iterator[str]:
    """Yield messages about rules that earlier rules shadow: the first match wins."""
    for index, (path, match) in enumerate(rules):
        region = _region_of(match)
        if _impossible_condition(region) is not None:
            continue
        covering = _covering_rules(region, rules[:index])
        if covering:
            verb = "matches" if len(covering) == 1 else "together match"
            yield f"{path} can never match: {' and '.join(covering)} before it {verb} every request that it matches"


def _covering_rules(region: _Region, rules: _Rules) -> list[str]:
    """Return the paths of rules that together match all of a region; empty if they may leave some of it."""
    single = next((path for path, match in rules if not _difference(region, match)), None)
    if single is not None:
        return [single]
    left, covering = [region], []
    for path, match in rules:
        rest = [part for uncovered in left for part in _difference(uncovered, match)]
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


def _region_of(match: Match) -> _Region:
    """Return the set of requests that a match selects."""
    return {condition.key: _within_domain(condition) for condition in match.conditions}


def _impossible_condition(region: _Region) -> Condition | None:
    """Return a condition of the region that no request can satisfy; None: all can be satisfied."""
    return next((condition for condition in region.values() if _is_empty(condition)), None)


def _difference(region: _Region, match: Match) -> list[_Region]:
    """Return regions that together cover every request of `region` that does not match.

    They may also contain matching requests, because the intersection of two patterns is not always known.
    """
    outside: list[_Region] = []
    inside = dict(region)  # requests of the region that satisfy the conditions so far
    for condition in match.conditions:
        if _is_always_true(condition):
            continue
        key = condition.key
        restricted = inside.get(key, _within_domain(Condition(key)))
        parts_outside, part_inside = _split(restricted, _within_domain(condition))
        outside += [{**inside, key: part} for part in parts_outside]
        if part_inside is None:
            return [region]
        inside[key] = part_inside
    return outside


def _within_domain(condition: Condition) -> Condition:
    """Return the condition restricted to the values that requests can have."""
    if condition.key not in RANGES:
        return condition
    low, high = max(condition.low or 0, _LEAST[condition.key]), condition.high
    if condition.key == "prompt_tokens":  # integers
        low, high = ceil(low), None if high is None else ceil(high)
    return replace(condition, low=low, high=high)


def _is_empty(condition: Condition) -> bool:
    """Whether no request can satisfy a condition."""
    if condition.key in RANGES:
        return condition.low is not None and condition.high is not None and condition.low >= condition.high
    return condition.key == "model" and condition.texts == ("",)


def _is_always_true(condition: Condition) -> bool:
    """Whether every request satisfies a condition. False for metadata, because a request may lack the key."""
    if condition.texts:
        return "*" in condition.texts and not condition.key.startswith(METADATA)
    if condition.key not in RANGES:
        return False
    return condition.high is None and (condition.low is None or condition.low <= _LEAST[condition.key])


def _split(base: Condition, other: Condition) -> tuple[list[Condition], Condition | None]:
    """Split `base` by another condition on the same key.

    Return the parts of `base` that do not satisfy `other`, and the part that does; None: no part does.
    """
    if base.key in FLAGS:
        if base.flag is None:
            return [replace(other, flag=not other.flag)], other
        return ([], base) if base.flag is other.flag else ([base], None)
    if base.key in RANGES:
        return _split_range(base, other)
    if not base.texts:
        return [base], other  # no pattern describes the complement of a pattern: keep the whole condition
    inside = tuple(text for text in base.texts if any(_is_within(text, pattern) for pattern in other.texts))
    outside = tuple(text for text in base.texts if text not in inside)
    parts_outside = [replace(base, texts=outside)] if outside else []
    return parts_outside, replace(base, texts=inside) if inside else None


def _split_range(base: Condition, other: Condition) -> tuple[list[Condition], Condition | None]:
    """Split a range as `_split` does: the parts below and above `other` are outside."""
    assert base.low is not None and other.low is not None
    is_below = base.high is not None and base.high <= other.low
    parts_outside = [base if is_below else replace(base, high=other.low)]
    if other.high is not None:
        parts_outside.append(replace(base, low=max(base.low, other.high)))
    high = min((bound for bound in (base.high, other.high) if bound is not None), default=None)
    inside = replace(base, low=max(base.low, other.low), high=high)
    return [part for part in parts_outside if not _is_empty(part)], None if _is_empty(inside) else inside


def _is_within(pattern: str, other: str) -> bool:
    """Whether every text that matches `pattern` is known to match the pattern `other`, too."""
    if pattern == other or not set(pattern) & _WILDCARDS:
        return pattern == other or fnmatchcase(pattern, other)
    # A pattern matches another one as if it were a text if the other's only wildcard is *.
    return not set(other) & set("?[") and "[" not in pattern and fnmatchcase(pattern, other)
