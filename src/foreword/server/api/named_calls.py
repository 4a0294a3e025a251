"""Tool-call formats with a header that names the tool before JSON arguments (gpt-oss, newer Mistral models)."""

import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foreword.server.api.call_format import (
    ArgumentsDelta,
    CallFormat,
    CallStart,
    Event,
    Schemas,
    TextDelta,
    by_name,
    is_object,
    merge_events,
    with_layout,
)
from foreword.structured.params import StructuredOutputs

_MAX_HEADER = 160  # characters; function names have at most 64


@dataclass(frozen=True)
class NamedFormat(CallFormat):
    """A format of tool calls: a header with the tool's name, then a JSON object.

    Answers have no control tokens in their text, so a header is recognized by the words that remain of it.
    """

    marks: tuple[str, ...]  # texts with which a header begins
    header: str  # pattern of a complete header, with {} for the names of the tools
    example: str  # a call as the model writes it, with {name} and {given} (the arguments)
    characters: str  # regular expression of a character between a mark and the opening brace
    # Grammar of a call before its arguments, with {name}; and "+" if an answer may have several calls.
    grammar: tuple[str, str]
    name_begins: bool = (
        False  # whether a tool's name begins a header at the start of an answer, line or sentence
    )
    divisions: tuple[str, ...] = ()  # headers of messages for the user, which are not part of the text
    opening: str = ""  # header of a message for the user that only the start of an answer may have

    def format_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "".join(
            self.example.replace("{name}", name).replace("{given}", json.dumps(given))
            for name, given in calls
        )

    def required_grammar(self, tools: Sequence[tuple[str, Any]], max_calls: int | None) -> StructuredOutputs:
        before, repeats = self.grammar
        names = " | ".join(f"call_{number}" for number in range(len(tools)))
        rules = [f"start: call{'' if max_calls == 1 else repeats}", f"call: {names}"]
        for number, (name, schema) in enumerate(tools):
            arguments = with_layout({**schema, "title": f"tool {name}"})
            rules.append(f"call_{number}: {before.replace('{name}', name)} %json {json.dumps(arguments)}")
        return StructuredOutputs(grammar="\n".join(rules))

    def reader(self, tools: Schemas, only_calls: bool = False, max_calls: int | None = None) -> "NamedReader":
        return NamedReader(self, tools, only_calls, max_calls)


class _ObjectEnd:
    """Finds the end of a JSON object whose opening brace has been read."""

    def __init__(self) -> None:
        self._depth = 1  # number of open braces and brackets
        self._in_string = self._is_escaped = False

    def is_end(self, character: str) -> bool:
        """Read the next character; return whether it ends the object."""
        if self._in_string:
            self._in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")
        return self._depth == 0


class NamedReader:
    """Incremental parser of a `NamedFormat`; it holds back calls, and text that may become a header."""

    def __init__(
        self,
        call_format: NamedFormat,
        tools: Schemas,
        only_calls: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._format = call_format
        self._only_calls, self._max_calls = only_calls, max_calls
        self._names = tuple(tools)
        longest_first = sorted(map(re.escape, tools), key=len, reverse=True)
        self._header = re.compile(call_format.header.format("|".join(longest_first)))
        self._held = ""  # text without events so far
        self._in_header = False  # whether `_held` begins with a mark
        self._name = ""  # tool of the call whose arguments are being read
        self._arguments: _ObjectEnd | None = None  # None: outside of arguments
        self._start = 0  # index in `_held` at which the arguments start
        self._last = ""  # last character of the text; empty at the start and after a call
        self._has_text = False  # whether text other than space was reported after the last call
        self.count = 0

    @property
    def is_cut(self) -> bool:
        return self._arguments is not None

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        waiting = deque(text)
        while waiting:
            self._held += waiting.popleft()
            if self._arguments is not None:
                self._read_arguments(self._arguments, events)
            else:
                waiting.extendleft(reversed(self._read_text(events)))
        return merge_events(events)

    def finish(self) -> list[Event]:
        """End the answer: an incomplete call is text, unless a grammar required it."""
        events: list[Event] = []
        held, self._held = self._held, ""
        if not self._only_calls and held not in self._divisions():
            self._add_text(held, events)
        return merge_events(events)

    def _read_text(self, events: list[Event]) -> str:
        """Handle a new character outside of arguments; return characters that have to be read again."""
        held = self._held
        if self._in_header:
            header = self._header.fullmatch(held)
            if header is not None:
                self._name, self._start = header["name"], len(held) - 1
                self._arguments, self._in_header = _ObjectEnd(), False
                return ""
            if len(held) < _MAX_HEADER and re.match(self._format.characters, held[-1]):
                return ""
        elif held in (marks := self._marks()):
            self._in_header = True
            return ""
        elif any(start.startswith(held) for start in (*marks, *self._divisions())):
            return ""
        # The held-back text is no header: its first character, or the division that it begins with, is complete.
        self._in_header, self._held = False, ""
        divisions = [division for division in self._divisions() if held.startswith(division)]
        division = max(divisions, key=len, default="")
        if division and not held[len(division)].isspace():
            self._add_text("\n" if self._has_text else "", events)
            return held[len(division) :]
        self._add_text(held[0], events)
        return held[1:]

    def _marks(self) -> tuple[str, ...]:
        """Return the texts with which a header may begin at this position."""
        is_start = not self._last or self._last in "\n.!?:…"
        return (*self._format.marks, *(self._names if self._format.name_begins and is_start else ()))

    def _divisions(self) -> tuple[str, ...]:
        """Return the headers of messages for the user that may be at this position."""
        opening = self._format.opening
        return (*self._format.divisions, opening) if opening and not self._last else self._format.divisions

    def _read_arguments(self, arguments: _ObjectEnd, events: list[Event]) -> None:
        """Handle a new character of arguments; if they are no JSON object, the whole call is text."""
        if not arguments.is_end(self._held[-1]):
            return
        held, self._held, self._arguments = self._held, "", None
        given = held[self._start :]
        if not is_object(given):
            self._add_text(held, events)
            return
        if self._max_calls is None or self.count < self._max_calls:
            events += [CallStart(self.count, self._name), ArgumentsDelta(self.count, given)]
            self.count += 1
        self._last, self._has_text = "", False

    def _add_text(self, text: str, events: list[Event]) -> None:
        """Add the event of a text; space after a call is dropped."""
        if self.count and not self._has_text:
            text = text.lstrip()
        if text:
            self._has_text |= bool(text.strip())
            self._last = text[-1]
            events.append(TextDelta(text))


_RECIPIENT = " to=functions."
_CHANNELS = "commentary", "analysis"

NAMED_FORMATS = by_name(
    NamedFormat(
        "openai",
        marks=(
            *(f"{start}{channel}{_RECIPIENT}" for start in ("assistant", "") for channel in _CHANNELS),
            f"assistant{_RECIPIENT}",
            _RECIPIENT,
            _RECIPIENT.lstrip(),
        ),
        header=r".*to=functions\.(?P<name>{}) ?(?:commentary|analysis)? ?(?:json|code)? ?\{{",
        example="<|start|>assistant<|channel|>commentary to=functions.{name} "
        "<|constrain|>json<|message|>{given}<|call|>",
        characters="[a-zA-Z0-9_ -]",
        # A call ends the answer, so there is no second one.
        grammar=('<|channel|> "commentary to=functions.{name} " <|constrain|> "json" <|message|>', ""),
        divisions=("assistantcommentary", "assistantfinal"),
        opening="commentary",
        reasoning_end="<|end|><|start|>assistant",
    ),
    NamedFormat(
        "mistral_args",
        marks=("[TOOL_CALLS]",),
        header=r"(?:\[TOOL_CALLS\])?(?P<name>{})(?:(?:\[CALL_ID\])?[a-zA-Z0-9]{{9}})?(?:\[ARGS\])?\{{",
        example="[TOOL_CALLS]{name}[ARGS]{given}",
        characters=r"[a-zA-Z0-9_\[\]-]",
        grammar=('"{name}"', "+"),
        name_begins=True,
    ),
)
"""Formats by vLLM's parser names; vLLM's parser `mistral` reads `mistral_args`, too, for newer models."""
