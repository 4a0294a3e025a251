"""Chooses the drafter where the settings name none: the one place that decides."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreword.acceptance.rules.rule import Rule
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.names import named_methods
from foreword.models.heads.shipped import ShippedHead

SpeculationOption = str | bool | Mapping[str, Any] | None
"""`"auto"` or True, `"off"`, False or None, a method's name, or a configuration as an object or as JSON."""

WITHOUT_A_HEAD: Mapping[str, Any] = {"method": "suffix", "num_speculative_tokens": 8}
"""What `auto` means where it is safe and no head was trained for the model: it needs none. How many of the draft tokens
are verified is measured."""

WITH_A_HEAD: Mapping[str, Any] = {"combine": "route", "num_speculative_tokens": 4}
LOOKUP = "ngram"
"""A lookup runs beside a head at nearly no cost: with several requests a head's own passes cost more than its drafts
gain, and a lookup drafts repetitive texts as well."""


@dataclass(frozen=True)
class SpeculationChoice:
    """The drafter, and why it was chosen."""

    config: SpeculationConfig | None  # None: speculation is off
    reason: str  # in a few words, for people


def choose_speculation(
    setting: SpeculationOption,
    is_shape_invariant: bool,
    acceptance_rule: str = "coupled",
    head: ShippedHead | None = None,
) -> SpeculationChoice:
    """Return what a setting means on this backend; `head` is the shipped head of the model.

    `auto` turns speculation on only where a draft cannot change a text by changing the size of a pass. A setting that
    names the head's method gets this head, and one that names the methods of the default is the default.
    """
    given = _named(setting, None if head is None else _with_head(head))
    if given is not None:
        return SpeculationChoice(given, "named in the settings")
    if not is_auto(setting):
        return SpeculationChoice(None, "switched off")
    if not is_shape_invariant:
        return SpeculationChoice(
            None, "this backend's numbers depend on the size of a pass: name a drafter to turn it on"
        )
    if Rule.parse(acceptance_rule) is not Rule.COUPLED:
        return SpeculationChoice(
            None,
            f"acceptance rule {acceptance_rule!r} keeps a text's distribution, not the text: name a drafter",
        )
    if head is not None:
        reason = (
            f"the head {head.name} was trained for this model, {LOOKUP} costs nearly nothing; "
            "each drafts where the measured gain is positive"
        )
        return SpeculationChoice(_with_head(head), reason)
    config = SpeculationConfig.parse(WITHOUT_A_HEAD)
    return SpeculationChoice(
        config, "drafts cannot change a text here, and are made where the measured gain is positive"
    )


def is_auto(setting: SpeculationOption) -> bool:
    """Return whether the drafter is chosen for the model and backend."""
    return setting is True or setting == "auto"


def check_choice(setting: SpeculationOption) -> SpeculationConfig | None:
    """Return the configuration that a setting names; None for `auto` and `off`. Nothing needs to be loaded."""
    return _named(setting, None)


def _with_head(head: ShippedHead) -> SpeculationConfig:
    return SpeculationConfig.parse({"method": [head.method, LOOKUP], "model": head.name, **WITH_A_HEAD})


def _named(setting: SpeculationOption, base: SpeculationConfig | None) -> SpeculationConfig | None:
    if setting is None or isinstance(setting, bool) or setting in ("auto", "off"):
        return None
    if isinstance(setting, str) and not setting.lstrip().startswith("{"):
        setting = named_methods(setting)
    config = SpeculationConfig.parse(setting)
    has_own_head = any(key == "model" for key, _ in config.options)
    if base is None or has_own_head or base.method[0] not in config.method:
        return config
    return SpeculationConfig.parse(setting, base)
