"""What a family has or has not."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """Something that a family has never, always, or where its config.json says so."""

    always: bool = False
    key: str | None = None  # a true-or-false key of config.json
    default: bool = False  # where it is missing


NEVER = Switch()
