"""JSON tool-call formats of model families, and an incremental parser of text and calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foreword.server.api.untagged_calls import CallObject, Found, UntaggedReader
from foreword.structured.params import StructuredOutputs

AUTO = "auto"


@dataclass(frozen=True)
class ToolFormat:
    """Calls are JSON objects with name and arguments, with or without marks, single or in a list."""

    name: str
    begin: str = ""  # before the calls; empty: an answer with calls consists only of calls
    end: str = ""  # after the calls
    inner: str = ""  # between a mark and its contents
    arguments: str = "arguments"  # key of the arguments
    is_list: bool = False  # all calls in one list; False: each call between its own marks
    hidden: str = ""  # control token that may precede the calls; not part of the text

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return calls (name, arguments) as the model would write them."""
        entries = [json.dumps({"name": name, self.arguments: given}) for name, given in calls]
        if self.is_list:
            return f"{self.begin}{self.inner}[{', '.join(entries)}]{self.inner}{self.end}"
        return "\n".join(f"{self.begin}{self.inner}{entry}{self.inner}{self.end}" for entry in entries)

    def forced(self, tools: Sequence[tuple[str, Any]], most: int | None) -> StructuredOutputs:
        """Return a grammar for at least one call of these tools (name, argument schema), and at most `most`."""
        call = {"anyOf": [self._call_schema(name, schema) for name, schema in tools]}
        listed = {
            "type": "array",
            "items": call,
            "minItems": 1,
            **({} if most is None else {"maxItems": most}),
        }
        body = f"%json {json.dumps(_laid_out(listed if self.is_list else call))}"
        parts = _text(self.begin + self.inner), body, _text(self.inner + self.end)
        marked = " ".join(part for part in parts if part)
        if self.is_list or not self.begin or most == 1:
            return StructuredOutputs(grammar=f"start: {marked}")
        return StructuredOutputs(grammar=f'start: call ("\\n" call)*\ncall: {marked}')

    def allowed(self, tools: Sequence[tuple[str, Any]]) -> StructuredOutputs | None:
        """Return a grammar for text in which calls are valid calls of these tools; None: not possible."""
        if not self.begin:
            return None
        call: dict[str, Any] = {"anyOf": [self._call_schema(name, schema) for name, schema in tools]}
        schema = {"type": "array", "items": call, "minItems": 1} if self.is_list else call
        tag = {"begin": self.begin + self.inner, "schema": _laid_out(schema), "end": self.inner + self.end}
        return StructuredOutputs(structural_tag={"structures": [tag], "triggers": [self.begin]})

    def reader(
        self, tools: Mapping[str, Mapping[str, Any]], only_calls: bool = False, most: int | None = None
    ) -> "ToolReading":
        """Return a parser of an answer with these tools (argument schemas by name); see `ToolReader`."""
        return ToolReader(self, tools, only_calls, most)

    def _call_schema(self, name: str, schema: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON schema
        return {
            "title": f"tool {name}",  # shown in errors about its schema
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments: schema},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


def _text(mark: str) -> str:
    return json.dumps(mark, ensure_ascii=False) if mark else ""


def _laid_out(schema: dict[str, Any]) -> dict[str, Any]:
    """Add the JSON layout that the models were trained on."""
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "x-guidance": options}


FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n"),
        ToolFormat("smollm", "<tool_call>", "</tool_call>", is_list=True),
        ToolFormat("llama3_json", arguments="parameters", hidden="<|python_tag|>"),
        ToolFormat("llama4_json", arguments="parameters", hidden="<|python_tag|>"),
        ToolFormat("mistral", is_list=True, hidden="[TOOL_CALLS]"),
        ToolFormat("granite", is_list=True, hidden="<|tool_call|>"),
        ToolFormat("hunyuan_a13b", "<tool_calls>", "</tool_calls>", is_list=True),
        ToolFormat("internlm", "<|action_start|><|plugin|>", "<|action_end|>", "\n", "parameters"),
        ToolFormat("jamba", "<tool_calls>", "</tool_calls>", "\n", is_list=True),
        ToolFormat("phi4_mini_json", is_list=True, hidden="functools"),
        ToolFormat("xlam", is_list=True),
    )
}
"""Formats by vLLM's parser names; `tool_blocks` adds formats that are not JSON objects."""


@dataclass(frozen=True)
class TextDelta:
    """Text outside of calls."""

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


def joined(events: list[Event]) -> list[Event]:
    """Merge neighbouring texts, and neighbouring arguments of one call."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            merged[-1] = TextDelta(last.text + event.text)
        elif (
            isinstance(event, ArgumentsDelta)
            and isinstance(last, ArgumentsDelta)
            and last.index == event.index
        ):
            merged[-1] = ArgumentsDelta(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged


class ToolReading(Protocol):
    """Incremental parser of text and calls in one answer."""

    count: int  # number of calls

    @property
    def is_cut(self) -> bool:
        """Whether the text ends inside a call."""
        ...

    def feed(self, text: str) -> list[Event]:
        """Return the events for new text."""
        ...

    def finish(self) -> list[Event]:
        """Return held-back events at the end."""
        ...


_BETWEEN = " \n\t\r,;[]"
"""Characters allowed between calls without marks."""


class ToolReader:
    """Incremental parser; text that may become a mark or a call is held back."""

    def __init__(
        self,
        form: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]],
        only_calls: bool = False,
        most: int | None = None,
    ) -> None:
        """`tools` are argument schemas by name; at most `most` calls are reported, None: all.

        `only_calls`: the grammar allows nothing else, so that the rest of a cut call is not text.
        """
        self._most = most
        self._form = form
        self._only_calls = only_calls
        self._tools = tools
        self._held = ""  # text that may become a mark, or everything since a mark
        self._call: CallObject | None = None  # currently parsed
        self._is_reported = False  # whether that call is reported
        self._arguments: list[str] = []  # unreported arguments of that call
        self._inside = False  # between marks
        self._has_text = False  # non-space text has occurred
        self._has_text_since_call = False  # non-space text has occurred since the last call
        self._untagged = UntaggedReader(tools)
        self.count = 0  # number of calls

    @property
    def is_cut(self) -> bool:
        return self._call is not None

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            self._held += character
            self._step(character, events)
        return self._wanted(events)

    def finish(self) -> list[Event]:
        """End the answer: held-back text is text, unless it belongs to a reported call."""
        events: list[Event] = []
        held, self._held = self._held, ""
        is_rest = (self._call is not None and self._is_reported) or self._is_rest(held)
        if not self._only_calls:
            self._add_text("" if is_rest else held, events)
            self._flush(events)
        return self._wanted(events)

    def _wanted(self, events: list[Event]) -> list[Event]:
        most = self.count if self._most is None else self._most
        return joined([event for event in events if isinstance(event, TextDelta) or event.index < most])

    def _is_rest(self, held: str) -> bool:
        """Whether it is only separators, or a cut mark."""
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
                self._add_text(held.removesuffix(form.begin), events)
                self._held, self._inside = form.begin, True
                return
            kept = overlap(held, form.begin)
            self._add_text(held[: len(held) - kept], events)
            self._held = held[len(held) - kept :]
            return
        shown = held.lstrip()
        calls = shown.removeprefix(form.hidden).lstrip()
        if not self._has_text and (form.hidden.startswith(shown) or not calls):
            return  # it may become the mark
        if not self._has_text and (calls[0] == "{" or (calls[0] == "[" and form.is_list)):
            self._inside = True
            if calls[0] == "{":
                self._begin_call()
            for character in calls[1:]:
                self._step(character, events)
        else:
            self._add_text(held, events)
            self._held = ""

    def _between(self, character: str, events: list[Event]) -> None:
        """Handle a character inside marks, between calls."""
        if character == "{":
            self._begin_call()
        elif self._form.end and self._held.endswith(self._form.end):
            if self.count:
                self._held = ""
            self._add_text(self._held, events)
            self._held, self._inside = "", False
        elif not self._form.end and character not in _BETWEEN:
            self._inside = False
            self._add_text(
                character if self.count else self._held, events
            )  # without calls, all of it is text
            self._held = ""

    def _begin_call(self) -> None:
        self._call, self._is_reported, self._arguments = CallObject(), False, []

    def _read(self, character: str, events: list[Event]) -> None:
        call = self._call
        assert call is not None
        self._arguments.append(call.read(character))
        name = call.name
        if not self._is_reported and (name is not None or call.is_over):
            if name is None or name not in self._tools:
                self._give_up(events)
                return
            self._flush(events)
            self._is_reported, self._has_text_since_call = True, False
            events.append(CallStart(self.count, name))
            self.count += 1
        if not self._is_reported:
            return
        self._held = ""
        if call.is_over and not call.has_arguments:
            self._arguments.append("{}")
        if more := "".join(self._arguments):
            events.append(ArgumentsDelta(self.count - 1, more))
        self._arguments = []
        if call.is_over:
            self._call = None

    def _give_up(self, events: list[Event]) -> None:
        """Treat the object as text, since it is no call of a tool."""
        held, self._held = self._held, ""
        self._call, self._inside = None, False
        self._add_text(held, events)

    def _add_text(self, text: str, events: list[Event]) -> None:
        """Report text outside of marks, including calls in it."""
        self._has_text |= bool(text.strip())
        self._report([text] if self._only_calls else self._untagged.feed(text), events)

    def _flush(self, events: list[Event]) -> None:
        self._report(self._untagged.finish(), events)

    def _report(self, found: list[Found], events: list[Event]) -> None:
        """Number the calls; space around them is reported only between texts."""
        for one in found:
            if isinstance(one, str):
                text = one if self._has_text_since_call else one.lstrip()
                self._has_text_since_call |= bool(text)
                if text:
                    events.append(TextDelta(text))
            else:
                self._has_text_since_call = False
                events += [CallStart(self.count, one.name), ArgumentsDelta(self.count, one.arguments)]
                self.count += 1


def overlap(text: str, mark: str) -> int:
    """Return how many trailing characters may start the mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
