"""How families of models write tool calls, and reads text and calls from an answer while it grows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foreword.server.api.untagged_calls import CallObject, Found, UntaggedReader
from foreword.structured.params import StructuredOutputs

AUTO = "auto"


@dataclass(frozen=True)
class ToolFormat:
    """Calls are JSON objects with a name and arguments, between marks or without, each by itself or in a list."""

    name: str
    begin: str = ""  # before the calls; empty: an answer with calls is nothing but calls
    end: str = ""  # after the calls
    inner: str = ""  # between a mark and what stands inside
    arguments: str = "arguments"  # what the arguments are called
    is_list: bool = False  # all calls in one list; else each between marks of its own
    hidden: str = ""  # a control token that may stand before the calls; it is not part of the text

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls (name, arguments) as the model itself would have written them."""
        entries = [json.dumps({"name": name, self.arguments: given}) for name, given in calls]
        if self.is_list:
            return f"{self.begin}{self.inner}[{', '.join(entries)}]{self.inner}{self.end}"
        return "\n".join(f"{self.begin}{self.inner}{entry}{self.inner}{self.end}" for entry in entries)

    def forced(self, tools: Sequence[tuple[str, Any]], most: int | None) -> StructuredOutputs:
        """An answer that is one call of these tools (name, schema of its arguments) or more, at most so many."""
        call = {"anyOf": [self._call_schema(name, schema) for name, schema in tools]}
        if self.is_list or not self.begin:
            listed: dict[str, Any] = {"type": "array", "items": call, "minItems": 1}
            if most is not None:
                listed["maxItems"] = most
            body = f"%json {json.dumps(_laid_out(listed if self.is_list else call))}"
        else:
            body = f"%json {json.dumps(_laid_out(call))}"
        marked = " ".join(
            part for part in (_text(self.begin + self.inner), body, _text(self.inner + self.end)) if part
        )
        if self.is_list or not self.begin or most == 1:
            return StructuredOutputs(grammar=f"start: {marked}")
        return StructuredOutputs(grammar=f'start: call ("\\n" call)*\ncall: {marked}')

    def allowed(self, tools: Sequence[tuple[str, Any]]) -> StructuredOutputs | None:
        """Any text in which calls, where there are some, are calls of these tools; None: that cannot be prescribed."""
        if not self.begin:
            return None
        call: dict[str, Any] = {"anyOf": [self._call_schema(name, schema) for name, schema in tools]}
        schema = {"type": "array", "items": call, "minItems": 1} if self.is_list else call
        tag = {"begin": self.begin + self.inner, "schema": _laid_out(schema), "end": self.inner + self.end}
        return StructuredOutputs(structural_tag={"structures": [tag], "triggers": [self.begin]})

    def reader(
        self, tools: Mapping[str, Mapping[str, Any]], only_calls: bool = False, most: int | None = None
    ) -> "ToolReading":
        """What reads an answer with these tools (schemas of arguments by name); see `ToolReader`."""
        return ToolReader(self, tools, only_calls, most)

    def _call_schema(self, name: str, schema: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON schema
        return {
            "title": f"tool {name}",  # named in errors about its schema
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments: schema},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


def _text(mark: str) -> str:
    return json.dumps(mark, ensure_ascii=False) if mark else ""


def _laid_out(schema: dict[str, Any]) -> dict[str, Any]:
    """With the one way to write JSON that the models were taught."""
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
"""By vLLM's names of parsers; `tool_formats` has those that are no JSON objects, too."""


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


class ToolReading(Protocol):
    """Reads text and calls from one answer while it grows."""

    count: int  # calls so far

    @property
    def is_cut(self) -> bool:
        """Whether the text so far ends inside a call."""
        ...

    def feed(self, text: str) -> list[Event]:
        """What the answer has gained."""
        ...

    def finish(self) -> list[Event]:
        """What was held back at its end."""
        ...


_BETWEEN = " \n\t\r,;[]"
"""What may stand between calls that have no marks."""


class ToolReader:
    """Takes text as it comes; what may still become a mark or a call is held back."""

    def __init__(
        self,
        form: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]],
        only_calls: bool = False,
        most: int | None = None,
    ) -> None:
        """`tools` are the schemas of arguments by name; at most `most` calls are reported, None: all.

        `only_calls`: the answer's grammar leaves room for nothing else, so that the rest of a cut call is no text.
        """
        self._most = most
        self._form = form
        self._only_calls = only_calls
        self._tools = tools
        self._held = ""  # text that may become a mark, or everything since a mark
        self._call: CallObject | None = None  # being read
        self._is_reported = False  # whether that call is
        self._arguments: list[str] = []  # of that call, not reported yet
        self._inside = False  # between marks
        self._has_said = False  # text with anything but space has come
        self._is_speaking = False  # the same since the last call
        self._untagged = UntaggedReader(tools)
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
        return self._wanted(events)

    def finish(self) -> list[Event]:
        """End the answer: what is held back is text, unless it is the rest of a call that was reported."""
        events: list[Event] = []
        held, self._held = self._held, ""
        is_rest = (self._call is not None and self._is_reported) or self._is_rest(held)
        if not self._only_calls:
            self._say("" if is_rest else held, events)
            self._flush(events)
        return self._wanted(events)

    def _wanted(self, events: list[Event]) -> list[Event]:
        most = self.count if self._most is None else self._most
        return joined([event for event in events if isinstance(event, Said) or event.index < most])

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
            kept = overlap(held, form.begin)
            self._say(held[: len(held) - kept], events)
            self._held = held[len(held) - kept :]
            return
        shown = held.lstrip()
        calls = shown.removeprefix(form.hidden).lstrip()
        if not self._has_said and (form.hidden.startswith(shown) or not calls):
            return  # it may become the mark
        if not self._has_said and (calls[0] == "{" or (calls[0] == "[" and form.is_list)):
            self._inside = True
            if calls[0] == "{":
                self._begin_call()
            for character in calls[1:]:
                self._step(character, events)
        else:
            self._say(held, events)
            self._held = ""

    def _between(self, character: str, events: list[Event]) -> None:
        """Inside, where no call is being read."""
        if character == "{":
            self._begin_call()
        elif self._form.end and self._held.endswith(self._form.end):
            if self.count:
                self._held = ""
            self._say(self._held, events)
            self._held, self._inside = "", False
        elif not self._form.end and character not in _BETWEEN:
            self._inside = False
            self._say(character if self.count else self._held, events)  # without calls, all of it is text
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
            self._is_reported, self._is_speaking = True, False
            events.append(Called(self.count, name))
            self.count += 1
        if not self._is_reported:
            return
        self._held = ""
        if call.is_over and not call.has_arguments:
            self._arguments.append("{}")
        if more := "".join(self._arguments):
            events.append(Given(self.count - 1, more))
        self._arguments = []
        if call.is_over:
            self._call = None

    def _give_up(self, events: list[Event]) -> None:
        """An object, but no call of a tool: it is text."""
        held, self._held = self._held, ""
        self._call, self._inside = None, False
        self._say(held, events)

    def _say(self, text: str, events: list[Event]) -> None:
        """Report text outside of marks, with the calls in it."""
        self._has_said |= bool(text.strip())
        self._report([text] if self._only_calls else self._untagged.feed(text), events)

    def _flush(self, events: list[Event]) -> None:
        """Report what is held back of the text before a call or the answer's end."""
        self._report(self._untagged.finish(), events)

    def _report(self, found: list[Found], events: list[Event]) -> None:
        """Number the calls; space around them is reported only between texts."""
        for one in found:
            if isinstance(one, str):
                text = one if self._is_speaking else one.lstrip()
                self._is_speaking |= bool(text)
                if text:
                    events.append(Said(text))
            else:
                self._is_speaking = False
                events += [Called(self.count, one.name), Given(self.count, one.arguments)]
                self.count += 1


def overlap(text: str, mark: str) -> int:
    """How many of the last characters may be the beginning of the mark."""
    return next(
        (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0
    )
