"""Rules of a policy file that no request can ever come to."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from foreword.control.policy_file.document import PolicyFile
from foreword.control.policy_file.matching import METADATA, Condition, Match

_Named = tuple[str, Match]


def unreachable(policy: PolicyFile) -> list[str]:
    """One line for each, by name. Rules that only several earlier ones together leave nothing for are not found."""
    cohorts = [(f"cohort {rule.name}", rule.match) for rule in policy.cohorts]
    classes = [(f"service class {one.name}", one.match) for one in policy.service.classes]
    limits = [(f"latency rule {rule.name}", rule.match) for rule in policy.latency]
    shares = [
        (f"share of {tenant}", Match((Condition("tenant", texts=(tenant,)),)))
        for tenant, _ in policy.service.shares
    ]
    found = [line for rules in (cohorts, classes, shares) for line in _behind_others(rules)]
    return found + [line for rule in limits for line in _impossible(*rule)]


def _behind_others(rules: Sequence[_Named]) -> Iterator[str]:
    """Of rules of which the first that fits is taken."""
    for place, (name, match) in enumerate(rules):
        impossible = list(_impossible(name, match))
        yield from impossible
        before = next((one for one, its in rules[:place] if _covers(its, match)), None)
        if before is not None and not impossible:
            yield f"{name} can never fit: all that it is for is taken by {before}, which stands before it"


def _impossible(name: str, match: Match) -> Iterator[str]:
    for one in match.conditions:
        is_empty = one.low is not None and one.high is not None and one.low >= one.high
        if is_empty or (one.high is not None and one.high <= 0):
            yield f"{name} can never fit: no {one.key} is {one.wanted}"


def _covers(first: Match, later: Match) -> bool:
    """Whether whatever fits the later one fits the first."""
    own = {one.key: one for one in later.conditions}
    return all(
        _is_always(one) or (one.key in own and _implies(own[one.key], one)) for one in first.conditions
    )


def _is_always(one: Condition) -> bool:
    """It holds for every request; metadata may not be there at all."""
    if one.flag is not None:
        return False
    if one.texts:
        return "*" in one.texts and not one.key.startswith(METADATA)
    return (one.low is None or one.low <= 0) and one.high is None


def _implies(later: Condition, first: Condition) -> bool:
    """Of two conditions for the same key."""
    if later.flag is not None:
        return later.flag is first.flag
    if later.texts:
        return all(any(_is_within(text, other) for other in first.texts) for text in later.texts)
    is_low = first.low is None or (later.low is not None and later.low >= first.low)
    return is_low and (first.high is None or (later.high is not None and later.high <= first.high))


def _is_within(pattern: str, other: str) -> bool:
    """Whether all that a pattern stands for is what another one does too; a no may be wrong."""
    if not set(pattern) & set("*?["):
        return fnmatchcase(pattern, other)
    return pattern == other or (
        not set(other) & set("?[") and "[" not in pattern and fnmatchcase(pattern, other)
    )
