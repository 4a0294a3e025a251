"""Sets of requests described by conditions, and their differences."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import ceil

from foreword.control.policy_file.matching import FLAGS, METADATA, RANGES, Condition, Match

Region = Mapping[str, Condition]
"""Requests that satisfy every condition; keys without a condition are unrestricted."""

_LEAST = {"temperature": 0, "prompt_tokens": 1}
_WILDCARDS = frozenset("*?[")


def region_of(match: Match) -> Region:
    """Return the set of requests that a match selects."""
    return {one.key: _within_domain(one) for one in match.conditions}


def impossible(region: Region) -> Condition | None:
    """Return a condition that no request can satisfy."""
    return next((one for one in region.values() if _is_empty(one)), None)


def without(region: Region, match: Match) -> list[Region]:
    """Return regions that cover every request of `region` outside the match.

    They may contain more, because intersections of patterns are not always known.
    """
    left: list[Region] = []
    inside = dict(region)
    for condition in match.conditions:
        if _is_always(condition):
            continue
        key = condition.key
        outside, common = _split(inside.get(key, _within_domain(Condition(key))), _within_domain(condition))
        left += [{**inside, key: part} for part in outside]
        if common is None:
            return [region]
        inside[key] = common
    return left


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


def _is_always(one: Condition) -> bool:
    """Whether every request satisfies it; metadata may be missing."""
    if one.texts:
        return "*" in one.texts and not one.key.startswith(METADATA)
    return one.key in RANGES and (one.low is None or one.low <= _LEAST[one.key]) and one.high is None


def _split(own: Condition, by: Condition) -> tuple[list[Condition], Condition | None]:
    """Return the parts of a condition outside another one with the same key, and the part inside."""
    if own.key in FLAGS:
        if own.flag is None:
            return [replace(by, flag=not by.flag)], by
        return ([], own) if own.flag is by.flag else ([own], None)
    if own.key in RANGES:
        return _split_range(own, by)
    if not own.texts:
        return [own], by  # the complement of a pattern is no pattern: keep the whole
    within = tuple(text for text in own.texts if any(_is_within(text, other) for other in by.texts))
    rest = tuple(text for text in own.texts if text not in within)
    return [replace(own, texts=rest)] if rest else [], replace(own, texts=within) if within else None


def _split_range(own: Condition, by: Condition) -> tuple[list[Condition], Condition | None]:
    assert own.low is not None and by.low is not None
    below = own if own.high is not None and own.high <= by.low else replace(own, high=by.low)
    above = None if by.high is None else replace(own, low=max(own.low, by.high))
    high = by.high if own.high is None else own.high if by.high is None else min(own.high, by.high)
    common = replace(own, low=max(own.low, by.low), high=high)
    parts = [part for part in (below, above) if part is not None and not _is_empty(part)]
    return parts, None if _is_empty(common) else common


def _is_within(pattern: str, other: str) -> bool:
    """Whether every text of a pattern matches another pattern; False may be wrong."""
    if not set(pattern) & _WILDCARDS:
        return fnmatchcase(pattern, other)
    return pattern == other or (
        not set(other) & set("?[") and "[" not in pattern and fnmatchcase(pattern, other)
    )
