"""Resolves the `speculation` setting, and chooses the drafter if it names none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreword.acceptance.rules.rule import Rule
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.names import named_methods
from foreword.models.heads.shipped import ShippedHead

SpeculationOption = str | bool | Mapping[str, Any] | None
"""`"auto"` or True, `"off"`, False or None, a method's name, or a configuration as an object or as JSON."""

MOST_DRAFT_TOKENS = 16
"""Maximum draft tokens of `auto`. The policy often uses fewer, by measured costs and acceptance."""

WITHOUT_A_HEAD: Mapping[str, Any] = {"method": "suffix", "num_speculative_tokens": MOST_DRAFT_TOKENS}
"""Drafter of `auto` for models without a trained head. The policy decides how many draft tokens are verified."""

WITH_A_HEAD: Mapping[str, Any] = {"combine": "route", "num_speculative_tokens": MOST_DRAFT_TOKENS}
"""Settings of `auto` besides the drafters, for models with a trained head: each step calls the head or the lookup."""

LOOKUP = "ngram"
"""Lookup drafter that `auto` uses beside a head.

A lookup costs almost nothing. With many requests, a head's passes cost more than they gain.
"""


@dataclass(frozen=True)
class SpeculationChoice:
    """The chosen drafter and the reason."""

    config: SpeculationConfig | None  # None: speculation is off
    reason: str  # short explanation for users


def choose_speculation(
    setting: SpeculationOption,
    is_shape_invariant: bool,
    acceptance_rule: str = "coupled",
    head: ShippedHead | None = None,
) -> SpeculationChoice:
    """Resolve a `speculation` setting for this backend; `head` is the head shipped for the model, or None.

    `auto` enables speculation only if texts do not depend on the number of tokens in a pass. A setting that names the
    method of the shipped head uses that head.
    """
    named = check_choice(setting, None if head is None else _with_head(head))
    if named is not None:
        return SpeculationChoice(named, "named in the settings")
    if setting is not True and setting != "auto":
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


def _with_head(head: ShippedHead) -> SpeculationConfig:
    """Return the configuration of `auto` for a model with this head."""
    return SpeculationConfig.parse({"method": [head.method, LOOKUP], "model": head.name, **WITH_A_HEAD})


def check_choice(
    setting: SpeculationOption, base: SpeculationConfig | None = None
) -> SpeculationConfig | None:
    """Return the configuration that a setting names, None for `auto` and `off`; raise `RequestError` if it is invalid.

    If it names the method of `base` but no model, it inherits the other settings of `base`.
    """
    if setting is None or isinstance(setting, bool) or setting in ("auto", "off"):
        return None
    if isinstance(setting, str) and not setting.lstrip().startswith("{"):
        setting = named_methods(setting)
    config = SpeculationConfig.parse(setting)
    names_model = any(key == "model" for key, _ in config.options)
    if base is None or names_model or base.method[0] not in config.method:
        return config
    return SpeculationConfig.parse(setting, base)
