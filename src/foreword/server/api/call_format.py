"""Interfaces of tool-call formats and their incremental parsers, and the events that the parsers return."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from foreword.structured.params import StructuredOutputs

AUTO = "auto"  # name of the parser that the chat template determines

Schemas = Mapping[str, Mapping[str, Any]]
"""Argument schemas by tool name."""

_Format = TypeVar("_Format", bound="CallFormat")


def by_name(*formats: _Format) -> dict[str, _Format]:
    """Return the formats by name."""
    return {call_format.name: call_format for call_format in formats}


@dataclass(frozen=True)
class CallFormat(ABC):
    """A format of tool calls."""

    name: str
    reasoning_end: str = field(default="", kw_only=True)  # tag before calls; empty: the reasoning format's

    @abstractmethod
    def format_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return calls (name, arguments) as the model would write them."""

    @abstractmethod
    def required_grammar(self, tools: Sequence[tuple[str, Any]], max_calls: int | None) -> StructuredOutputs:
        """Return a grammar for at least one call of these tools (name, argument schema), and at most `max_calls`."""

    def optional_grammar(self, tools: Sequence[tuple[str, Any]]) -> StructuredOutputs | None:
        """Return a grammar for text in which calls are valid calls of these tools; None: they are not constrained."""
        return None

    @abstractmethod
    def reader(self, tools: Schemas, only_calls: bool = False, max_calls: int | None = None) -> "CallReader":
        """Return a parser of an answer with these tools.

        `max_calls`: the maximum number of returned calls; None: all. `only_calls`: a grammar allows only calls, so the
        beginning of a cut call is not text.
        """


@dataclass(frozen=True)
class TextDelta:
    """New text outside of calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Start of a call: its name is known."""

    index: int  # index of the call
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Event = TextDelta | CallStart | ArgumentsDelta


def merge_events(events: list[Event]) -> list[Event]:
    """Return the events with neighbouring texts merged, and neighbouring arguments of one call."""
    merged: list[Event] = []
    for event in events:
        match (merged[-1] if merged else None, event):
            case TextDelta(earlier), TextDelta(text):
                merged[-1] = TextDelta(earlier + text)
            case ArgumentsDelta(index, earlier), ArgumentsDelta(new_index, text) if index == new_index:
                merged[-1] = ArgumentsDelta(index, earlier + text)
            case _:
                merged.append(event)
    return merged


class CallReader(Protocol):
    """Interface of the incremental parsers of text and calls in one answer."""

    count: int  # number of calls so far

    @property
    def is_cut(self) -> bool:
        """Whether the text ends inside a call."""

    def feed(self, text: str) -> list[Event]:
        """Return the events for new text."""

    def finish(self) -> list[Event]:
        """Return the events for held-back text, at the end of the answer."""


def with_layout(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the JSON layout on which the models were trained."""
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "x-guidance": options}


def overlap(text: str, tag: str) -> int:
    """Return the number of characters at the end of a text that may be the start of the tag."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if tag.startswith(text[-size:])), 0)


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
