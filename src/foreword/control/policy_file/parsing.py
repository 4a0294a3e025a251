"""Parses JSON into a `PolicyFile`; errors name the key in the file."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from sys import float_info
from typing import Any

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
    ServiceClass,
    ServiceRules,
)
from foreword.control.policy_file.fields import Fields, policy_error
from foreword.control.policy_file.matching import FLAGS, METADATA, RANGES, TEXTS, Condition, Match
from foreword.control.service import DEFAULT_SERVICE, Slo
from foreword.control.settings import ControlSettings
from foreword.errors import RequestError

VERSION = 1  # format version of the file
SPLITS = ("temperature_band", "adapter", "priority", "stream")
"""Request traits by which `split` can separate the estimates of a cohort."""

SLOS = tuple(slo.name.lower() for slo in Slo)
MOST_COHORTS = 64
"""Maximum value of `max_cohorts`, which includes the cohort `other`."""


def read_policy(path: Path) -> PolicyFile:
    """Read and parse a policy file; raise `RequestError` if it is invalid."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise policy_error(str(path), f"cannot be read: {reason}") from None

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the object of these keys and values; raise an error for a duplicate key, which `json` would accept."""
        parsed: dict[str, Any] = {}
        for key, entry in pairs:
            if key in parsed:
                raise policy_error(str(path), f"has {key!r} twice in one object")
            parsed[key] = entry
        return parsed

    try:
        value = json.loads(text, object_pairs_hook=as_object)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise policy_error(str(path), f"is not JSON: {error}") from None
    policy = parse_policy(value)
    if policy.state_file is not None and (path.parent / policy.state_file).resolve() == path.resolve():
        raise policy_error(
            "state_file", "is this file itself: it would be replaced by the state of roll-outs"
        )
    return policy


def parse_policy(value: object) -> PolicyFile:
    """Return the policy that a JSON object describes; raise `RequestError` if it is invalid."""
    top = Fields(value, "the policy")
    if top.number("version", None, whole=True) != VERSION:
        raise policy_error("version", f"must be {VERSION}")
    drafters = {name: _drafter(name, given) for name, given in top.objects("drafters").items()}
    cohorts = tuple(_cohort(given, index, drafters) for index, given in enumerate(top.list("cohorts")))
    names = [rule.name for rule in cohorts]
    if len(set(names)) != len(names):
        raise policy_error("cohorts", "two of them have the same name")
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
        service=_service(top.take("service", {})),
        overload=_overload(top.take("overload", None)),
        prices=_prices(top.take("prices", None)),
        state_file=top.text("state_file", None),
    )
    top.take("notes", None)  # free for people and tools
    defaults.end()
    top.end()
    if len(cohorts) >= policy.max_cohorts:
        raise policy_error(
            "cohorts", f"there are {len(cohorts)}; max_cohorts allows {policy.max_cohorts - 1}"
        )
    return policy


def _settings(given: Fields) -> ControlSettings:
    """Read control settings. The file has ratios to plain decoding; the settings have gains, which are ratios - 1."""
    default = ControlSettings()
    return ControlSettings(
        margin_on=given.number("margin_on", 1 + default.margin_on, least=0) - 1,
        margin_off=given.number("margin_off", 1 + default.margin_off, least=0) - 1,
        probe_share=given.number("probe_share", default.probe_share, least=0, most=1),
        reference_share=given.number("reference_share", default.reference_share, least=0, most=1),
    )


def _drafter(name: str, value: object) -> DrafterRule:
    given = Fields(value, f"drafters.{name}")
    price = given.number("price_per_hour", None, least=0)
    return DrafterRule(name, given.take_rest(), price)


def _cohort(value: object, index: int, drafters: Mapping[str, DrafterRule]) -> CohortRule:
    given = Fields(value, f"cohorts[{index}]")
    name = given.text("name", None)
    if not name or name == OTHER or "/" in name:
        raise policy_error(given.path_of("name"), f"must be a name without '/', and not {OTHER!r}")
    rule = CohortRule(
        name,
        match=parse_match(given.take("match", {}), given.path_of("match")),
        # An empty list means no drafters; without the key, the engine's default drafters are used.
        drafters=tuple(given.choices("drafters", (), drafters)) if given.has("drafters") else None,
        state=given.choice("state", None, STATES),
        max_depth=given.number("max_depth", None, least=1, most=MAX_DRAFT_NODES, whole=True),
    )
    given.end()
    return rule


def parse_match(value: object, path: str) -> Match:
    """Return the conditions of a rule; `path` is that of its key `match` in the file."""
    given = Fields(value, path)
    return Match(tuple(_condition(key, wanted, path) for key, wanted in given.take_rest().items()))


def _condition(key: str, wanted: Any, path: str) -> Condition:  # noqa: ANN401 - any JSON
    key_path = f"{path}.{key}"
    if key in FLAGS:
        if not isinstance(wanted, bool):
            raise policy_error(key_path, "must be true or false")
        return Condition(key, flag=wanted)
    if key in RANGES:
        bounds = wanted if isinstance(wanted, list) else []
        if len(bounds) != 2 or not all(bound is None or _is_number(bound) for bound in bounds):
            raise policy_error(key_path, "must be [LEAST, BELOW], either of them a number or null")
        return Condition(key, low=bounds[0], high=bounds[1])
    if key in TEXTS or (key.startswith(METADATA) and key != METADATA):
        texts = [wanted] if isinstance(wanted, str) else wanted
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise policy_error(key_path, "must be a text with * and ?, or a list of such")
        return Condition(key, texts=tuple(texts))
    allowed = ", ".join((*TEXTS, *RANGES, *FLAGS, f"{METADATA}KEY"))
    raise policy_error(path, f"unknown key {key!r}; known are {allowed}")


def _is_number(value: object) -> bool:
    """Whether a JSON value is a finite number. An integer may be too large for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def _rollouts(
    value: object, drafters: Mapping[str, DrafterRule], cohorts: list[str]
) -> tuple[RolloutRule, ...]:
    listed = value if isinstance(value, list) else [value]
    rules = tuple(_rollout(given, index, drafters, cohorts) for index, given in enumerate(listed))
    pairs = [(rule.drafter, rule.cohort) for rule in rules]
    if len(set(pairs)) != len(pairs):
        raise policy_error("rollout", "two of them are for the same pair")
    return rules


def _rollout(
    value: object, index: int, drafters: Mapping[str, DrafterRule], cohorts: list[str]
) -> RolloutRule:
    given = Fields(value, f"rollout[{index}]")
    pair = given.take("pair", None)
    if not isinstance(pair, list) or len(pair) != 2 or pair[0] not in drafters or pair[1] not in cohorts:
        raise policy_error(given.path_of("pair"), "must be [DRAFTER, COHORT], both of them named in the file")
    defaults = RolloutRule(*pair)
    steps = given.take("steps", list(defaults.steps))
    are_numbers = isinstance(steps, list) and steps and all(map(_is_number, steps))
    if not are_numbers or steps != sorted(set(steps)) or steps[0] <= 0 or steps[-1] > 100:
        raise policy_error(given.path_of("steps"), "must be rising percentages, such as [1, 5, 25, 100]")
    rule = RolloutRule(
        defaults.drafter,
        defaults.cohort,
        start=given.choice("start", defaults.start, STARTS),
        promote=given.choice("promote", defaults.promote, ("auto", "manual")),
        salt=given.text("salt", defaults.salt),
        steps=tuple(steps),
        min_requests=given.number("min_requests", defaults.min_requests, least=1, whole=True),
        min_passes=given.number("min_passes", defaults.min_passes, least=1, whole=True),
        verify_samples=given.number("verify_samples", defaults.verify_samples, least=1, whole=True),
        min_levels=given.number("min_levels", defaults.min_levels, least=1, whole=True),
        guards=_guards(given.take("guards", {}), given.path_of("guards")),
    )
    given.end()
    return rule


def _guards(value: object, path: str) -> Guards:
    given = Fields(value, path)
    limits = {guard.name: given.number(guard.name, guard.default, least=0) for guard in fields(Guards)}
    given.end()
    return Guards(**limits)


def _latency(name: str, value: object) -> LatencyRule:
    given = Fields(value, f"latency.{name}")
    limit = given.number("tpot_ms", None, least=0)
    if not limit:
        raise policy_error(given.path_of("tpot_ms"), "must be a positive number of milliseconds")
    match = parse_match(given.take("match", {}), given.path_of("match"))
    given.end()
    return LatencyRule(name, match, limit)


def _service(value: object) -> ServiceRules:
    given = Fields(value, "service")
    classes = tuple(_service_class(name, rule) for name, rule in given.objects("classes").items())
    shares = tuple(_weight(tenant, weight) for tenant, weight in given.objects("shares").items())
    rules = ServiceRules(
        classes, shares, given.number("ageing_seconds", DEFAULT_SERVICE.ageing_seconds, least=0)
    )
    given.end()
    return rules


def _service_class(name: str, value: object) -> ServiceClass:
    given = Fields(value, f"service.classes.{name}")
    slo = given.choice("slo", None, SLOS)
    if slo is None:
        raise policy_error(given.path_of("slo"), f"is missing: one of {', '.join(SLOS)}")
    limit = given.number("tpot_ms", None, least=0)
    if (slo == "latency") != bool(limit):
        raise policy_error(
            given.path_of("tpot_ms"),
            "must be a positive number of milliseconds for slo latency, and for no other",
        )
    match = parse_match(given.take("match", {}), given.path_of("match"))
    given.end()
    return ServiceClass(name, Slo[slo.upper()], match, limit)


def _weight(tenant: str, weight: object) -> tuple[str, float]:
    """Return a tenant pattern and its checked weight."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise policy_error(f"service.shares.{tenant}", f"must be a positive number, not {weight!r}")
    return tenant, float(weight)


def _overload(value: object) -> OverloadRule | None:
    if value is None:
        return None
    given, default = Fields(value, "overload"), OverloadRule()
    rule = OverloadRule(
        queue=given.number("queue", default.queue, least=0, whole=True),
        kv_usage=given.number("kv_usage", default.kv_usage, least=0, most=1),
        stop=tuple(given.texts("stop", ())),
    )
    given.end()
    return rule


def _prices(value: object) -> Prices | None:
    if value is None:
        return None
    given = Fields(value, "prices")
    target = given.number("target", None, least=0)
    if target is None:
        missing = "is missing: give the price of the target's device per hour"
        raise policy_error(given.path_of("target"), missing)
    prices = Prices(target, given.number("draft", 0.0, least=0))
    given.end()
    return prices
