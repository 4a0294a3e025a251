"""Reads text and calls of tools from an answer while it grows."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from foreword.server.api.tools.formats import ToolFormat


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

_BETWEEN = " \n\t\r,;[]"
"""What may stand between calls that have no marks."""


class ToolReader:
    """Takes text as it comes; what may turn out to be a mark, or no call after all, is held back."""

    def __init__(
        self, form: ToolFormat, tools: Collection[str], only_calls: bool = False, most: int | None = None
    ) -> None:
        """`only_calls`: the answer's form leaves room for nothing else, so that what is cut is no text.

        `most` calls are told; None: all.
        """
        self._most = most
        self._form = form
        self._only_calls = only_calls
        self._tools = frozenset(tools)
        self._held = ""  # not told yet: text that may become a mark, or everything since a mark
        self._call: _Call | None = None  # being read
        self._inside = False  # between marks
        self._has_said = False  # anything but space was told as text
        self._is_speaking = False  # the same since the last call
        self.count = 0  # calls so far

    @property
    def is_cut(self) -> bool:
        """Whether the text so far ends inside a call."""
        return self._call is not None

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            self._held += character
            self._step(character, events)
        return _joined([event for event in events if self._is_wanted(event)])

    def _is_wanted(self, event: Event) -> bool:
        return isinstance(event, Said) or self._most is None or event.index < self._most

    def finish(self) -> list[Event]:
        """The answer has ended: what was held back is text, unless it is the rest of a call that was told."""
        held, self._held = self._held, ""
        is_told = self._call is not None and self._call.is_told
        return [] if self._only_calls or is_told or self._is_rest(held) or not held else [Said(held)]

    def _is_rest(self, held: str) -> bool:
        """Whether it is no more than what stands between calls, or a mark that was cut."""
        if not self._inside or self._call is not None or not self.count:
            return False
        left = held.strip(_BETWEEN)
        return left in ("", self._form.begin) or self._form.end.startswith(left)

    def _step(self, character: str, events: list[Event]) -> None:
        if self._call is not None:
            self._read(character, events)
        elif self._inside:
            self._between(character, events)
        else:
            self._outside(events)

    def _outside(self, events: list[Event]) -> None:
        form, held = self._form, self._held
        if form.begin:
            if held.endswith(form.begin):
                self._say(held.removesuffix(form.begin), events)
                self._held, self._inside = form.begin, True
                return
            kept = _overlap(held, form.begin)
            self._say(held[: len(held) - kept], events)
            self._held = held[len(held) - kept :]
            return
        shown = held.lstrip()
        calls = shown.removeprefix(form.hidden).lstrip()
        if not self._has_said and (form.hidden.startswith(shown) or not calls):
            return  # it may become the mark
        if not self._has_said and (calls[0] == "{" or (calls[0] == "[" and form.is_list)):
            self._inside = True
            self._call = _Call(form.arguments, self.count) if calls[0] == "{" else None
            for character in calls[1:]:
                self._step(character, events)
        else:
            self._say(held, events)
            self._held = ""

    def _between(self, character: str, events: list[Event]) -> None:
        """Inside, where no call is being read."""
        if character == "{":
            self._call = _Call(self._form.arguments, self.count)
        elif self._form.end and self._held.endswith(self._form.end):
            if self.count:
                self._held = ""
            self._say(self._held, events)
            self._held, self._inside = "", False
        elif not self._form.end and character not in _BETWEEN:
            self._inside = False
            self._say(
                character if self.count else self._held, events
            )  # without any, it was no call after all
            self._held = ""

    def _read(self, character: str, events: list[Event]) -> None:
        call = self._call
        assert call is not None
        more = call.read(character)
        if call.name is not None and not call.is_told:
            if call.name not in self._tools:
                self._give_up(events)
                return
            call.is_told, self._is_speaking = True, False
            self.count += 1
            events.append(Called(call.index, call.name))
        if call.is_told:
            self._held = ""
            if pending := call.take() + more:
                events.append(Given(call.index, pending))
        else:
            call.pend(more)
        if call.is_over:
            if not call.is_told:
                self._give_up(events)
                return
            if not call.has_arguments:
                events.append(Given(call.index, "{}"))
            self._call = None

    def _give_up(self, events: list[Event]) -> None:
        """An object, but no call of a tool: it is text."""
        held, self._held = self._held, ""
        self._call, self._inside = None, False
        self._say(held, events)

    def _say(self, text: str, events: list[Event]) -> None:
        """Space around calls is told only between texts."""
        if text:
            self._has_said |= bool(text.strip())
            self._is_speaking |= bool(text.strip())
            if self._is_speaking:
                events.append(Said(text))


@dataclass
class _Call:
    """One object with a name and arguments, character by character."""

    arguments: str
    index: int
    name: str | None = None
    is_told: bool = False
    is_over: bool = False
    has_arguments: bool = False
    _depth: int = 1  # its own brace was read
    _key: str | None = None  # whose value comes or is being read
    _string: str | None = None  # being read, with its quotes
    _escaped: bool = False
    _reads_value: bool = False
    _pending: list[str] = field(default_factory=list)

    def read(self, character: str) -> str:
        """Returns what belongs to the arguments."""
        if self._string is not None:
            return self._read_string(character)
        if character == '"':
            self._string = character
            return self._of_arguments(character)
        if character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_over = self._depth == 0
            if self.is_over:
                return ""
        elif self._depth == 1 and character in ":,":
            self._reads_value = character == ":"
            self._key = self._key if self._reads_value else None
            return ""
        is_space = self._depth == 1 and character.isspace()
        return "" if is_space else self._of_arguments(character)

    def take(self) -> str:
        """Arguments that came before the name was known."""
        pending, self._pending = "".join(self._pending), []
        return pending

    def pend(self, more: str) -> None:
        self._pending.append(more)

    def _of_arguments(self, character: str) -> str:
        is_theirs = self._reads_value and self._key == self.arguments
        self.has_arguments |= is_theirs
        return character if is_theirs else ""

    def _read_string(self, character: str) -> str:
        assert self._string is not None
        self._string += character
        more = self._of_arguments(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._end_string()
        return more

    def _end_string(self) -> None:
        text, self._string = _decoded(self._string), None
        if self._depth != 1:
            return
        if not self._reads_value:
            self._key = "arguments" if text in ("arguments", "parameters") else text
            self._key = self.arguments if self._key == "arguments" else self._key
        elif self._key == "name":
            self.name = text


def _decoded(string: str | None) -> str:
    try:
        value: Any = json.loads(string or '""')
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _overlap(text: str, mark: str) -> int:
    """How many of the last characters may be the beginning of the mark."""
    return next(
        (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0
    )


def _joined(events: list[Event]) -> list[Event]:
    """Neighbours of a kind as one."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Said) and isinstance(last, Said):
            joined[-1] = Said(last.text + event.text)
        elif isinstance(event, Given) and isinstance(last, Given) and last.index == event.index:
            joined[-1] = Given(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined
