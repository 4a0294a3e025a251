"""Set operations on requests that are described by conditions, to find rules that no request can match."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import ceil

from foreword.control.policy_file.matching import FLAGS, METADATA, RANGES, Condition, Match

Region = Mapping[str, Condition]
"""The set of requests that satisfy a condition for each of some keys; other keys are unrestricted."""

_LEAST = {"temperature": 0, "prompt_tokens": 1}  # smallest value that a request can have
_WILDCARDS = frozenset("*?[")  # of `fnmatch`


def region_of(match: Match) -> Region:
    """Return the set of requests that a match selects."""
    return {condition.key: _within_domain(condition) for condition in match.conditions}


def impossible_condition(region: Region) -> Condition | None:
    """Return a condition of the region that no request can satisfy; None: all can be satisfied."""
    return next((condition for condition in region.values() if _is_empty(condition)), None)


def difference(region: Region, match: Match) -> list[Region]:
    """Return regions that together cover every request of `region` that does not match.

    They may also contain matching requests, because the intersection of two patterns is not always known.
    """
    outside: list[Region] = []
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
