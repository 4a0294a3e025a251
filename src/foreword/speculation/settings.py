"""Settings of drafters: dataclass fields with help text and limits, which registry, error messages and docs use."""

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

    words: str  # the allowed values after "must be", for an error message
    holds: Callable[[Any], bool]  # returns whether a value is allowed


def at_least(least: int) -> Limit:
    """Return the limit of a number that must not be smaller."""
    return Limit("0 or more" if least == 0 else f"at least {least}", lambda value: value >= least)


def setting(default: Any, text: str, limit: Limit | None = None) -> Any:  # noqa: ANN401
    """Return a field with this help text, which may state its limits."""
    return field(default=default, metadata={HELP: text, LIMIT: limit})


@dataclass(frozen=True)
class DrafterSettings:
    """Base class of a drafter's settings; also the settings of a drafter that has none.

    Raise `RequestError` for a value that is not allowed.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            limit, value = each.metadata.get(LIMIT), getattr(self, each.name)
            if limit is not None and not limit.holds(value):
                raise RequestError(f"speculation: {each.name} must be {limit.words}, not {value}")
