"""Parses JSON into a `PolicyFile`; errors name the place in the file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from sys import float_info
from typing import Any, TypeVar

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.control.policy_file.document import (
    OTHER,
    STARTS,
    STATES,
    CohortRule,
    DrafterRule,
    Guards,
    LatencyRule,
    OverloadRule,
    PolicyFile,
    Prices,
    RolloutRule,
)
from foreword.control.policy_file.fields import Fields, refuse
from foreword.control.policy_file.matching import FLAGS, METADATA, RANGES, TEXTS, Condition, Match
from foreword.control.policy_file.service_rules import parse_service
from foreword.control.settings import ControlSettings
from foreword.errors import RequestError

VERSION = 1
SPLITS = ("temperature_band", "adapter", "priority", "stream")
MOST_COHORTS = 64

_Rule = TypeVar("_Rule")


def read_policy(path: Path) -> PolicyFile:
    """Read and parse a file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise refuse(str(path), f"cannot be read: {reason}") from None

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Refuse duplicate keys, which JSON would accept silently."""
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [key for key, _ in pairs]
            raise refuse(
                str(path), f"has {next(n for n in names if names.count(n) > 1)!r} twice in one object"
            )
        return found

    try:
        value = json.loads(text, object_pairs_hook=once)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise refuse(str(path), f"is not JSON: {error}") from None
    policy = parse_policy(value)
    if policy.state_file is not None and (path.parent / policy.state_file).resolve() == path.resolve():
        raise refuse("state_file", "is this file itself: it would be replaced by the state of roll-outs")
    return policy


def parse_policy(value: object) -> PolicyFile:
    """Parse a JSON object."""
    top = Fields(value, "the policy")
    if top.number("version", None, whole=True) != VERSION:
        raise refuse("version", f"must be {VERSION}")
    drafters = {name: _drafter(name, given) for name, given in top.objects("drafters").items()}
    cohorts = tuple(_cohort(given, place, drafters) for place, given in enumerate(top.list("cohorts")))
    names = [rule.name for rule in cohorts]
    if len(set(names)) != len(names):
        raise refuse("cohorts", "two of them have the same name")
    defaults = Fields(top.take("defaults", {}), "defaults")
    policy = PolicyFile(
        state=defaults.choice("state", "on", STATES),
        max_depth=defaults.number("max_depth", None, least=1, most=MAX_DRAFT_NODES, whole=True),
        max_draft_share=defaults.number("max_draft_share", None, least=0),
        settings=_settings(defaults),
        drafters=drafters,
        cohorts=cohorts,
        split=tuple(top.choices("split", ("temperature_band",), SPLITS)),
        max_cohorts=top.number("max_cohorts", MOST_COHORTS, least=1, most=MOST_COHORTS, whole=True),
        rollouts=_rollouts(top.take("rollout", []), drafters, [*names, OTHER]),
        latency=tuple(_latency(name, given) for name, given in top.objects("latency").items()),
        service=parse_service(top.take("service", {}), parse_match),
        overload=_overload(top.take("overload", None)),
        prices=_prices(top.take("prices", None)),
        state_file=top.text("state_file", None),
    )
    top.take("notes", None)  # free for people and tools
    defaults.end()
    top.end()
    if len(cohorts) >= policy.max_cohorts:
        raise refuse("cohorts", f"there are {len(cohorts)}; max_cohorts allows {policy.max_cohorts - 1}")
    return policy


def _settings(defaults: Fields) -> ControlSettings:
    """Read control settings; the file has ratios to plain decoding, the settings gains."""
    own = ControlSettings()
    return ControlSettings(
        margin_on=defaults.number("margin_on", 1 + own.margin_on, least=0) - 1,
        margin_off=defaults.number("margin_off", 1 + own.margin_off, least=0) - 1,
        probe_share=defaults.number("probe_share", own.probe_share, least=0, most=1),
        reference_share=defaults.number("reference_share", own.reference_share, least=0, most=1),
    )


def _drafter(name: str, value: object) -> DrafterRule:
    given = Fields(value, f"drafters.{name}")
    price = given.number("price_per_hour", None, least=0)
    return DrafterRule(name, given.rest(), price)


def _cohort(value: object, place: int, drafters: Mapping[str, DrafterRule]) -> CohortRule:
    given = Fields(value, f"cohorts[{place}]")
    name = given.text("name", None)
    if not name or name == OTHER or "/" in name:
        raise refuse(given.place("name"), f"must be a name without '/', and not {OTHER!r}")
    named = given.choices("drafters", None, drafters) if given.has("drafters") else None
    rule = CohortRule(
        name,
        match=parse_match(given.take("match", {}), given.place("match")),
        drafters=None if named is None else tuple(named),
        state=given.choice("state", None, STATES),
        max_depth=given.number("max_depth", None, least=1, most=MAX_DRAFT_NODES, whole=True),
    )
    given.end()
    return rule


def parse_match(value: object, place: str) -> Match:
    """Parse the conditions of a rule."""
    given = Fields(value, place)
    return Match(tuple(_condition(key, wanted, place) for key, wanted in given.rest().items()))


def _condition(key: str, wanted: Any, place: str) -> Condition:  # noqa: ANN401 - any JSON
    where = f"{place}.{key}"
    if key in FLAGS:
        if not isinstance(wanted, bool):
            raise refuse(where, "must be true or false")
        return Condition(key, flag=wanted)
    if key in RANGES:
        bounds = wanted if isinstance(wanted, list) else []
        if len(bounds) != 2 or not all(bound is None or _is_number(bound) for bound in bounds):
            raise refuse(where, "must be [LEAST, BELOW], either of them a number or null")
        return Condition(key, low=bounds[0], high=bounds[1])
    if key in TEXTS or (key.startswith(METADATA) and key != METADATA):
        texts = [wanted] if isinstance(wanted, str) else wanted
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise refuse(where, "must be a text with * and ?, or a list of such")
        return Condition(key, texts=tuple(texts))
    known = ", ".join((*TEXTS, *RANGES, *FLAGS, f"{METADATA}KEY"))
    raise refuse(place, f"unknown key {key!r}; known are {known}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def _rollouts(
    value: object, drafters: Mapping[str, DrafterRule], cohorts: list[str]
) -> tuple[RolloutRule, ...]:
    listed = value if isinstance(value, list) else [value]
    rules = tuple(_rollout(given, place, drafters, cohorts) for place, given in enumerate(listed))
    pairs = [(rule.drafter, rule.cohort) for rule in rules]
    if len(set(pairs)) != len(pairs):
        raise refuse("rollout", "two of them are for the same pair")
    return rules


def _rollout(
    value: object, place: int, drafters: Mapping[str, DrafterRule], cohorts: list[str]
) -> RolloutRule:
    given = Fields(value, f"rollout[{place}]")
    pair = given.take("pair", None)
    if not isinstance(pair, list) or len(pair) != 2 or pair[0] not in drafters or pair[1] not in cohorts:
        raise refuse(given.place("pair"), "must be [DRAFTER, COHORT], both of them named in the file")
    own = RolloutRule(*pair)
    steps = given.take("steps", list(own.steps))
    rising = isinstance(steps, list) and steps and all(map(_is_number, steps)) and steps == sorted(set(steps))
    if not rising or steps[0] <= 0 or steps[-1] > 100:
        raise refuse(given.place("steps"), "must be rising percentages, such as [1, 5, 25, 100]")
    rule = RolloutRule(
        own.drafter,
        own.cohort,
        start=given.choice("start", own.start, STARTS),
        promote=given.choice("promote", own.promote, ("auto", "manual")),
        salt=given.text("salt", own.salt),
        steps=tuple(steps),
        min_requests=given.number("min_requests", own.min_requests, least=1, whole=True),
        min_passes=given.number("min_passes", own.min_passes, least=1, whole=True),
        verify_samples=given.number("verify_samples", own.verify_samples, least=1, whole=True),
        min_levels=given.number("min_levels", own.min_levels, least=1, whole=True),
        guards=_guards(given.take("guards", {}), given.place("guards")),
    )
    given.end()
    return rule


def _guards(value: object, place: str) -> Guards:
    given, own = Fields(value, place), Guards()
    found = {one.name: given.number(one.name, getattr(own, one.name), least=0) for one in fields(Guards)}
    given.end()
    return Guards(**found)


def _latency(name: str, value: object) -> LatencyRule:
    given = Fields(value, f"latency.{name}")
    limit = given.number("tpot_ms", None, least=0)
    if not limit:
        raise refuse(given.place("tpot_ms"), "must be a positive number of milliseconds")
    match = parse_match(given.take("match", {}), given.place("match"))
    given.end()
    return LatencyRule(name, match, limit)


def _overload(value: object) -> OverloadRule | None:
    def read(given: Fields) -> OverloadRule:
        own = OverloadRule()
        return OverloadRule(
            queue=given.number("queue", own.queue, least=0, whole=True),
            kv_usage=given.number("kv_usage", own.kv_usage, least=0, most=1),
            stop=tuple(given.texts("stop", ())),
        )

    return _optional(value, "overload", read)


def _prices(value: object) -> Prices | None:
    def read(given: Fields) -> Prices:
        target = given.number("target", None, least=0)
        if target is None:
            raise refuse(given.place("target"), "is missing: the price of the target's device for an hour")
        return Prices(target, given.number("draft", 0.0, least=0))

    return _optional(value, "prices", read)


def _optional(value: object, place: str, read: "Callable[[Fields], _Rule]") -> "_Rule | None":
    if value is None:
        return None
    given = Fields(value, place)
    rule = read(given)
    given.end()
    return rule
