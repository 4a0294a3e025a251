"""A conversation in the model's template, and the parser of its answers: reasoning, text and tool calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError
from foreword.server.api.answer_types import CalledTool, ToolCall, new_id
from foreword.server.api.call_format import (
    AUTO,
    ArgumentsDelta,
    CallFormat,
    CallReader,
    CallStart,
    Event,
    TextDelta,
)
from foreword.server.api.entry import new_request
from foreword.server.api.message_types import NAMED_TOOL, Message, Tool, ToolFunction
from foreword.server.api.reasoning import Reasoning, ReasoningReader, check_budget, reasoning_format
from foreword.server.api.request_types import ChatRequest, ResponsesRequest, ToolFields
from foreword.server.api.tool_blocks import FORMATS, format_of
from foreword.server.context import ServerContext
from foreword.server.middleware import ApiCaller
from foreword.structured.params import StructuredOutputs

_INTRODUCTION = """You may call tools. These are the tools, as JSON:
{tools}

To call one or more, answer with nothing but this, and do so only if it helps:
{example}"""


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call, and what constrains its calls."""

    call_format: CallFormat
    functions: Sequence[ToolFunction]
    choice: str = "auto"  # or "required"
    is_named: bool = False  # the request names the tool to call: the only one in `functions`, and required
    max_calls: int | None = None  # maximum number of calls

    def reader(self) -> CallReader:
        schemas = {function.name: function.argument_schema for function in self.functions}
        return self.call_format.reader(
            schemas, only_calls=self.choice == "required", max_calls=self.max_calls
        )

    def structured(self, other: StructuredOutputs | None) -> StructuredOutputs | None:
        """Return the grammar of the answer; `other` is the request's own response format."""
        schemas = [(function.name, function.argument_schema) for function in self.functions]
        if self.choice == "required":
            if other is not None:
                raise RequestError(
                    "tool_choice and a response format exclude each other; leave one of them out",
                    "tool_choice",
                )
            return self.call_format.required_grammar(schemas, self.max_calls)
        if other is None and all(function.strict for function in self.functions):
            return self.call_format.optional_grammar(schemas)
        return other

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools for a chat template."""
        return [{"type": "function", "function": function.for_template()} for function in self.functions]


def tool_use(
    tools: Sequence[Tool] | None, choice: str | None, parallel: bool | None, call_format: CallFormat
) -> ToolUse | None:
    """Return the tools that the answer may call; None if there are none. Raise `RequestError` for invalid ones."""
    functions = [tool.function for tool in tools or ()]
    if choice == "required" and not functions:
        raise RequestError("tool_choice: there are no tools; give some", "tool_choice")
    name = choice.removeprefix(NAMED_TOOL) if choice is not None and choice.startswith(NAMED_TOOL) else None
    if name is not None:
        functions = [function for function in functions if function.name == name]
        if not functions:
            raise RequestError(f"tool_choice: there is no tool {name[:64]!r}", "tool_choice")
        return ToolUse(call_format, functions, "required", is_named=True, max_calls=1)
    if not functions or choice == "none":
        return None
    if len({function.name for function in functions}) < len(functions):
        raise RequestError("tools: two of them have the same name", "tools")
    return ToolUse(call_format, functions, choice or "auto", max_calls=1 if parallel is False else None)


def shown_messages(
    messages: Sequence[Message], use: ToolUse | None, call_format: CallFormat, takes_tools: bool
) -> list[dict[str, Any]]:
    """Return the messages for a chat template; for one without tool support, tools are described in a message."""
    if takes_tools:
        return [message.for_template() for message in messages]
    shown = [_as_plain_message(message, call_format) for message in messages]
    if use is None:
        return shown
    if shown and shown[0]["role"] == "system":
        first = shown.pop(0)
        return [{**first, "content": f"{first['content']}\n\n{_introduction(use)}"}, *shown]
    return [{"role": "system", "content": _introduction(use)}, *shown]


def _as_plain_message(message: Message, call_format: CallFormat) -> dict[str, Any]:
    shown = message.for_template()
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.text}\n</tool_response>"}
    if message.tool_calls:
        text = f"{message.text}\n" if message.text else ""
        return {"role": "assistant", "content": text + call_format.format_calls(message.calls)}
    return shown


def _introduction(use: ToolUse) -> str:
    tools = "\n".join(json.dumps(function.for_template()) for function in use.functions)
    example = use.call_format.format_calls([("name of the tool", {"name of an argument": "its value"})])
    return _INTRODUCTION.format(tools=tools, example=example)


class ToolWriter:
    """Formats the tool calls of one answer, incrementally or as a whole."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._reader = use.reader()

    def feed(self, text: str, is_end: bool) -> tuple[str, list[ToolCall]]:
        """Parse new text of the answer; return its text outside of calls, and the new part of each call."""
        events = self._reader.feed(text)
        if is_end:
            events += self._reader.finish()
        return _text_of(events), _parts(events)

    def whole(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """Parse a whole answer; return its text (None if it has only calls) and its calls."""
        events = [*self._reader.feed(text), *self._reader.finish()]
        calls = _parts(events)
        for call in calls:
            call.index = UNSET
        has_calls = bool(calls) or self._use.choice == "required"
        return _text_of(events).strip() or None if has_calls else _text_of(events), calls

    def finish_reason(self, reason: str | None) -> str | None:
        """Return "tool_calls" if the answer ended after calls; the engine's reason for a named tool or a cut call."""
        reader = self._reader
        ended = reason == "stop" and reader.count > 0 and not reader.is_cut and not self._use.is_named
        return "tool_calls" if ended else reason


def _text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def _parts(events: list[Event]) -> list[ToolCall]:
    parts: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, CallStart):
            called = CalledTool(event.name, "")
            parts[event.index] = ToolCall(called, new_id("call"), "function", event.index)
        elif isinstance(event, ArgumentsDelta):
            part = parts.setdefault(event.index, ToolCall(CalledTool(), index=event.index))
            earlier = part.function.arguments
            part.function.arguments = (earlier if isinstance(earlier, str) else "") + event.text
    return list(parts.values())


@dataclass(frozen=True)
class Conversation:
    """Token ids of a conversation, with its tools and reasoning format."""

    ids: list[int]
    use: ToolUse | None = None  # None: the answer may call no tool
    reasoning: Reasoning | None = None

    @staticmethod
    async def of(
        context: ServerContext,
        body: ToolFields,
        messages: Sequence[Message],
        **options: Any,  # noqa: ANN401 - of `Tokenizer.encode_chat`
    ) -> "Conversation":
        """Apply the model's template to messages and tools, and tokenize the result."""
        tokenizer, settings = context.prompts.tokenizer, context.settings
        parser = settings.tool_call_parser
        call_format = format_of(tokenizer.chat_template) if parser == AUTO else FORMATS[parser]
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, call_format)
        tags = reasoning_format(settings.reasoning_parser, tokenizer)
        check_budget(body.thinking_token_budget, tags)
        ids = await context.prompts.chat(
            shown_messages(messages, use, call_format, tokenizer.takes_tools),
            use.for_template() if use is not None and tokenizer.takes_tools else None,
            **options,
        )
        return Conversation(ids, use, Reasoning.after(ids, tags, tokenizer))

    async def request(
        self, context: ServerContext, body: ChatRequest | ResponsesRequest, caller: ApiCaller, name: str
    ) -> NewRequest:
        """Return the engine's request, with the tools' grammar and the parameters of the reasoning before it."""

        def constrain(params: SamplingParams) -> SamplingParams:
            structured = params.structured if self.use is None else self.use.structured(params.structured)
            budget = body.thinking_token_budget
            # Before a response format the reasoning has its own end; before calls, what a call can follow.
            end = ""
            if self.use is not None and params.structured is None:
                end = self.use.call_format.reasoning_end
            thinking = None if self.reasoning is None else self.reasoning.limit(budget, structured, end)
            return replace(params, structured=structured, thinking=thinking)

        return await new_request(context, body, caller, name, self.ids, constrain)

    def reader(self) -> "AnswerReader":
        return AnswerReader(self)


@dataclass(frozen=True)
class AnswerPart:
    """New part of an answer, or all of it."""

    text: str | None  # None: only tool calls
    calls: list[ToolCall]
    reasoning: str = ""


class AnswerReader:
    """Parses one answer, incrementally or as a whole."""

    def __init__(self, conversation: Conversation) -> None:
        reasoning, use = conversation.reasoning, conversation.use
        self._reasoning_reader = None if reasoning is None else ReasoningReader(reasoning)
        self._tool_writer = None if use is None else ToolWriter(use)

    def feed(self, text: str, is_end: bool) -> AnswerPart:
        """Parse new text of the answer."""
        reasoning, text = self._split_reasoning(text, is_end)
        if self._tool_writer is None:
            return AnswerPart(text, [], reasoning)
        return AnswerPart(*self._tool_writer.feed(text, is_end), reasoning)

    def whole(self, text: str) -> AnswerPart:
        """Parse a whole answer."""
        reasoning, text = self._split_reasoning(text, is_end=True)
        if self._tool_writer is None:
            return AnswerPart(text, [], reasoning)
        return AnswerPart(*self._tool_writer.whole(text), reasoning)

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason for the client, given the engine's."""
        return reason if self._tool_writer is None else self._tool_writer.finish_reason(reason)

    def _split_reasoning(self, text: str, is_end: bool) -> tuple[str, str]:
        """Return the new reasoning, and the new text after it."""
        return ("", text) if self._reasoning_reader is None else self._reasoning_reader.feed(text, is_end)
