"""Settings of drafters: dataclass fields with a help text and limits, which the registry, refusals and docs read."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from foreword.errors import RequestError

REQUIRED = MISSING
"""Default of a setting that must be given."""

HELP, LIMIT = "help", "limit"
"""Keys of a field's metadata."""


@dataclass(frozen=True)
class Limit:
    """The allowed values of a setting."""

    words: str  # completes "must be"
    holds: Callable[[Any], bool]


def at_least(least: int) -> Limit:
    return Limit("0 or more" if least == 0 else f"at least {least}", lambda value: value >= least)


def setting(default: Any, text: str, limit: Limit | None = None) -> Any:  # noqa: ANN401
    """Return a field with this help text, which may state its limits."""
    return field(default=default, metadata={HELP: text, LIMIT: limit})


@dataclass(frozen=True)
class DrafterSettings:
    """Base of the settings of a drafter, and the settings of one that has none; refuses values beyond their limits."""

    def __post_init__(self) -> None:
        for one in fields(self):
            limit, value = one.metadata.get(LIMIT), getattr(self, one.name)
            if limit is not None and not limit.holds(value):
                raise RequestError(f"speculation: {one.name} must be {limit.words}, not {value}")
