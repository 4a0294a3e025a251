"""Regions: sets of requests that are described by conditions, and their differences."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import ceil

from foreword.control.policy_file.matching import FLAGS, METADATA, RANGES, Condition, Match

Region = Mapping[str, Condition]
"""Requests that satisfy every condition; keys without a condition are unrestricted."""

_LEAST = {"temperature": 0, "prompt_tokens": 1}  # smallest values of requests
_WILDCARDS = frozenset("*?[")


def region_of(match: Match) -> Region:
    """Return the set of requests that a match selects."""
    return {one.key: _within_domain(one) for one in match.conditions}


def impossible_condition(region: Region) -> Condition | None:
    """Return a condition that no request can satisfy, or None."""
    return next((one for one in region.values() if _is_empty(one)), None)


def difference(region: Region, match: Match) -> list[Region]:
    """Return regions that together cover every request of `region` that does not match.

    They may also contain matching requests, because the intersection of two patterns is not always known.
    """
    outside: list[Region] = []
    inside = dict(region)  # requests of the region that satisfy the conditions up to this one
    for condition in match.conditions:
        if _is_always_true(condition):
            continue
        key = condition.key
        base = inside.get(key, _within_domain(Condition(key)))
        parts, common = _split(base, _within_domain(condition))
        outside += [{**inside, key: part} for part in parts]
        if common is None:
            return [region]
        inside[key] = common
    return outside


def _within_domain(one: Condition) -> Condition:
    """Restrict a condition to the values that requests can have."""
    if one.key not in RANGES:
        return one
    low, high = max(one.low or 0, _LEAST[one.key]), one.high
    if one.key == "prompt_tokens":  # integers
        low, high = ceil(low), None if high is None else ceil(high)
    return replace(one, low=low, high=high)


def _is_empty(one: Condition) -> bool:
    if one.key in RANGES:
        return one.low is not None and one.high is not None and one.low >= one.high
    return one.key == "model" and one.texts == ("",)


def _is_always_true(one: Condition) -> bool:
    """Whether every request satisfies a condition. False for metadata, because a request may lack the key."""
    if one.texts:
        return "*" in one.texts and not one.key.startswith(METADATA)
    return one.key in RANGES and (one.low is None or one.low <= _LEAST[one.key]) and one.high is None


def _split(base: Condition, other: Condition) -> tuple[list[Condition], Condition | None]:
    """Return the parts of `base` outside a condition on the same key, and the part inside. None: they are disjoint."""
    if base.key in FLAGS:
        if base.flag is None:
            return [replace(other, flag=not other.flag)], other
        return ([], base) if base.flag is other.flag else ([base], None)
    if base.key in RANGES:
        return _split_range(base, other)
    if not base.texts:
        return [base], other  # no pattern describes the complement of a pattern: keep the whole condition
    within = tuple(text for text in base.texts if any(_is_within(text, pattern) for pattern in other.texts))
    rest = tuple(text for text in base.texts if text not in within)
    return [replace(base, texts=rest)] if rest else [], replace(base, texts=within) if within else None


def _split_range(base: Condition, other: Condition) -> tuple[list[Condition], Condition | None]:
    assert base.low is not None and other.low is not None
    below = base if base.high is not None and base.high <= other.low else replace(base, high=other.low)
    above = None if other.high is None else replace(base, low=max(base.low, other.high))
    high = min((bound for bound in (base.high, other.high) if bound is not None), default=None)
    common = replace(base, low=max(base.low, other.low), high=high)
    parts = [part for part in (below, above) if part is not None and not _is_empty(part)]
    return parts, None if _is_empty(common) else common


def _is_within(pattern: str, other: str) -> bool:
    """Whether every text that matches a pattern also matches the other one. False may be wrong, True is not."""
    if not set(pattern) & _WILDCARDS:
        return fnmatchcase(pattern, other)
    return pattern == other or (
        not set(other) & set("?[") and "[" not in pattern and fnmatchcase(pattern, other)
    )
