"""JSON tool-call formats of model families, and an incremental parser of text and calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foreword.server.api.call_format import (
    ArgumentsDelta,
    CallFormat,
    CallReader,
    CallStart,
    Event,
    Schemas,
    TextDelta,
    by_name,
    merge_events,
    overlap,
    with_layout,
)
from foreword.server.api.untagged_calls import CallObject, TextOrCall, UntaggedReader
from foreword.structured.params import StructuredOutputs


@dataclass(frozen=True)
class ToolFormat(CallFormat):
    """A format of tool calls: JSON objects with name and arguments, between tags or not, single or in a list."""

    begin: str = ""  # tag before the calls; empty: an answer with calls consists only of calls
    end: str = ""  # tag after the calls
    inner: str = ""  # space between a tag and the JSON
    arguments: str = "arguments"  # the JSON key of the arguments
    is_list: bool = False  # True: tags surround a list of all calls; False: tags surround each call
    hidden: str = ""  # control token that may precede the calls; it is not part of the text

    def format_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        entries = [json.dumps({"name": name, self.arguments: given}) for name, given in calls]
        if self.is_list:
            return f"{self.begin}{self.inner}[{', '.join(entries)}]{self.inner}{self.end}"
        return "\n".join(f"{self.begin}{self.inner}{entry}{self.inner}{self.end}" for entry in entries)

    def required_grammar(self, tools: Sequence[tuple[str, Any]], max_calls: int | None) -> StructuredOutputs:
        call = {"anyOf": [self._call_schema(name, schema) for name, schema in tools]}
        schema: dict[str, Any] = call
        if self.is_list:
            schema = {"type": "array", "items": call, "minItems": 1}
            if max_calls is not None:
                schema["maxItems"] = max_calls
        body = f"%json {json.dumps(with_layout(schema))}"
        parts = _grammar_literal(self.begin + self.inner), body, _grammar_literal(self.inner + self.end)
        marked = " ".join(part for part in parts if part)
        if self.is_list or not self.begin or max_calls == 1:
            return StructuredOutputs(grammar=f"start: {marked}")
        return StructuredOutputs(grammar=f'start: call ("\\n" call)*\ncall: {marked}')

    def optional_grammar(self, tools: Sequence[tuple[str, Any]]) -> StructuredOutputs | None:
        if not self.begin:
            return None
        call: dict[str, Any] = {"anyOf": [self._call_schema(name, schema) for name, schema in tools]}
        schema = {"type": "array", "items": call, "minItems": 1} if self.is_list else call
        tag = {"begin": self.begin + self.inner, "schema": with_layout(schema), "end": self.inner + self.end}
        return StructuredOutputs(structural_tag={"structures": [tag], "triggers": [self.begin]})

    def reader(self, tools: Schemas, only_calls: bool = False, max_calls: int | None = None) -> "CallReader":
        return ToolReader(self, tools, only_calls, max_calls)

    def _call_schema(self, name: str, schema: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON schema
        return {
            "title": f"tool {name}",  # errors about the schema show it
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments: schema},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


def _grammar_literal(tag: str) -> str:
    return json.dumps(tag, ensure_ascii=False) if tag else ""


FORMATS = by_name(
    ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n"),
    ToolFormat("granite4", "<tool_call>", "</tool_call>", "\n"),
    ToolFormat("longcat", "<longcat_tool_call>", "</longcat_tool_call>", "\n"),
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
"""JSON formats by vLLM's parser names; `tool_blocks.FORMATS` has all formats."""


_SEPARATORS = " \n\t\r,;[]"
"""Characters that may be between calls without tags."""


class ToolReader:
    """Incremental parser of a `ToolFormat`; it holds back text that may become a tag or a call."""

    def __init__(
        self,
        call_format: ToolFormat,
        tools: Schemas,
        only_calls: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._max_calls = max_calls
        self._format = call_format
        self._only_calls = only_calls
        self._tools = tools
        self._held = ""  # text that may become a tag, or everything since the opening tag
        self._call: CallObject | None = None  # the call that is being parsed
        self._is_reported = False  # whether the events have a `CallStart` of this call
        self._arguments: list[str] = []  # arguments of this call that are not reported yet
        # Whether the parser is in the calls: after an opening tag, or, in a format without tags, after the first { or [
        self._is_inside = False
        self._has_text = False  # whether the answer has text other than space
        self._has_text_since_call = False  # whether the answer has such text after the last call
        self._untagged = UntaggedReader(tools)
        self.count = 0

    @property
    def is_cut(self) -> bool:
        return self._call is not None

    def feed(self, text: str) -> list[Event]:
        """Return the events for new text."""
        events: list[Event] = []
        for character in text:
            self._held += character
            self._step(character, events)
        return self._within_limit(events)

    def finish(self) -> list[Event]:
        """End the answer: return held-back text as text.

        It is dropped if it belongs to a reported call or is a leftover after calls. With `only_calls` it is always
        dropped: then it can only be the beginning of a cut call.
        """
        events: list[Event] = []
        held, self._held = self._held, ""
        is_in_reported_call = self._call is not None and self._is_reported
        if not self._only_calls:
            self._add_text("" if is_in_reported_call or self._is_leftover(held) else held, events)
            self._flush(events)
        return self._within_limit(events)

    def _within_limit(self, events: list[Event]) -> list[Event]:
        """Return the events without those of calls beyond the maximum."""
        if self._max_calls is not None:
            limit = self._max_calls
            events = [event for event in events if isinstance(event, TextDelta) or event.index < limit]
        return merge_events(events)

    def _is_leftover(self, held: str) -> bool:
        """Whether the held-back text after calls is only separators, or part of a tag."""
        if not self._is_inside or self._call is not None or not self.count:
            return False
        left = held.strip(_SEPARATORS)
        return left in ("", self._format.begin) or self._format.end.startswith(left)

    def _step(self, character: str, events: list[Event]) -> None:
        if self._call is not None:
            self._read(character, events)
        elif self._is_inside:
            self._between(character, events)
        else:
            self._outside(events)

    def _outside(self, events: list[Event]) -> None:
        """Handle a character outside of tags, or before the calls of a format without tags."""
        call_format, held = self._format, self._held
        if call_format.begin:
            if held.endswith(call_format.begin):
                self._add_text(held.removesuffix(call_format.begin), events)
                self._held, self._is_inside = call_format.begin, True
                return
            partial_tag = overlap(held, call_format.begin)
            self._add_text(held[: len(held) - partial_tag], events)
            self._held = held[len(held) - partial_tag :]
            return
        written = held.lstrip()
        calls = written.removeprefix(call_format.hidden).lstrip()
        if not self._has_text and (call_format.hidden.startswith(written) or not calls):
            return  # `held` may become the control token
        if not self._has_text and (calls[0] == "{" or (calls[0] == "[" and call_format.is_list)):
            self._is_inside = True
            if calls[0] == "{":
                self._begin_call()
            for character in calls[1:]:
                self._step(character, events)
        else:
            self._add_text(held, events)
            self._held = ""

    def _between(self, character: str, events: list[Event]) -> None:
        """Handle a character inside tags, between calls."""
        if character == "{":
            self._begin_call()
        elif self._format.end and self._held.endswith(self._format.end):
            if self.count:
                self._held = ""
            self._add_text(self._held, events)
            self._held, self._is_inside = "", False
        elif not self._format.end and character not in _SEPARATORS:
            self._is_inside = False
            # Without a call, all of the held-back text is text.
            self._add_text(character if self.count else self._held, events)
            self._held = ""

    def _begin_call(self) -> None:
        self._call, self._is_reported, self._arguments = CallObject(), False, []

    def _read(self, character: str, events: list[Event]) -> None:
        """Handle a character inside a call: report the call once its name is known, and its arguments as they come."""
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
        """Treat the current object as text, since it does not call one of the tools."""
        held, self._held = self._held, ""
        self._call, self._is_inside = None, False
        self._add_text(held, events)

    def _add_text(self, text: str, events: list[Event]) -> None:
        """Add the events of text outside of tags, which may have untagged calls."""
        self._has_text |= bool(text.strip())
        self._add_results([text] if self._only_calls else self._untagged.feed(text), events)

    def _flush(self, events: list[Event]) -> None:
        self._add_results(self._untagged.finish(), events)

    def _add_results(self, results: list[TextOrCall], events: list[Event]) -> None:
        """Add the events of these texts and calls; space after a call is dropped."""
        for result in results:
            if isinstance(result, str):
                text = result if self._has_text_since_call else result.lstrip()
                self._has_text_since_call |= bool(text)
                if text:
                    events.append(TextDelta(text))
            else:
                self._has_text_since_call = False
                events += [CallStart(self.count, result.name), ArgumentsDelta(self.count, result.arguments)]
                self.count += 1
