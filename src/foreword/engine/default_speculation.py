"""Who guesses where nobody has said: the one place that decides."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreword.acceptance.rules.rule import Rule
from foreword.drafters.config import SpeculationConfig
from foreword.errors import RequestError

SpeculationOption = str | Mapping[str, Any] | None
"""`"auto"`, `"off"` or None, or a configuration as an object or as JSON."""

DEFAULT_SPECULATION: Mapping[str, Any] = {
    "method": "suffix",
    "num_speculative_tokens": 3,
    "disable_by_batch_size": 2,  # beside others there is less idle arithmetic to guess with
}
"""What `auto` means where it is safe: it needs no model, and three guesses cost little even if all are wrong."""


@dataclass(frozen=True)
class SpeculationChoice:
    """Who guesses, and why."""

    config: SpeculationConfig | None  # None: nobody
    reason: str  # in a few words, for people


def choose_speculation(
    setting: SpeculationOption, is_shape_invariant: bool, acceptance_rule: str = "coupled"
) -> SpeculationChoice:
    """What a setting means on this backend.

    `auto` guesses only where a draft cannot change a text by changing the size of a pass.
    """
    given = check_choice(setting)
    if given is not None:
        return SpeculationChoice(given, "asked for")
    if setting != "auto":
        return SpeculationChoice(None, "switched off")
    if not is_shape_invariant:
        return SpeculationChoice(
            None, "this backend's numbers depend on the size of a pass: ask for it by name"
        )
    config = SpeculationConfig.parse(DEFAULT_SPECULATION)
    if Rule.parse(acceptance_rule) is not Rule.COUPLED:
        return SpeculationChoice(
            None,
            f"acceptance rule {acceptance_rule!r} keeps the law of a text, not the text itself: ask for it by name",
        )
    return SpeculationChoice(
        config, "guesses cannot change a text here, and one request leaves arithmetic idle"
    )


def check_choice(setting: SpeculationOption) -> SpeculationConfig | None:
    """The configuration that a setting names; None for `auto` and `off`. Needs nothing to be loaded."""
    if setting is None or setting in ("auto", "off"):
        return None
    if isinstance(setting, str) and not setting.lstrip().startswith("{"):
        raise RequestError(f"speculation must be auto, off or a JSON object, not {setting!r}")
    return SpeculationConfig.parse(setting)
