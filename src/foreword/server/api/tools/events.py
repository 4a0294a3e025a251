"""Events of a growing answer: text, and calls of tools."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class Called:
    """A call begins: its name is known."""

    index: int  # which of the answer's calls
    name: str


@dataclass(frozen=True)
class Given:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Event = Said | Called | Given


def joined(events: list[Event]) -> list[Event]:
    """Merge neighbouring texts, and neighbouring arguments of one call."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Said) and isinstance(last, Said):
            merged[-1] = Said(last.text + event.text)
        elif isinstance(event, Given) and isinstance(last, Given) and last.index == event.index:
            merged[-1] = Given(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
