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
    choice: str = "auto"  # "auto" or "required"
    is_named: bool = False  # whether the request names the tool to call; it is the only one in `functions`
    max_calls: int | None = None  # maximum number of calls

    def reader(self) -> CallReader:
        """Return a parser of one answer."""
        schemas = {function.name: function.argument_schema for function in self.functions}
        return self.call_format.reader(
            schemas, only_calls=self.choice == "required", max_calls=self.max_calls
        )

    def structured(self, other: StructuredOutputs | None) -> StructuredOutputs | None:
        """Return the grammar of the answer; `other` is the request's response format."""
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


def call_format_of(context: ServerContext) -> CallFormat:
    """Return the server's format of tool calls."""
    parser = context.settings.tool_call_parser
    return format_of(context.prompts.tokenizer.chat_template) if parser == AUTO else FORMATS[parser]


def shown_messages(
    messages: Sequence[Message], use: ToolUse | None, call_format: CallFormat, takes_tools: bool
) -> list[dict[str, Any]]:
    """Return the messages for a chat template. If it does not support tools, a message describes them."""
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
    """Return a message with its calls and tool results as text."""
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.text}\n</tool_response>"}
    if message.tool_calls:
        text = f"{message.text}\n" if message.text else ""
        return {"role": "assistant", "content": text + call_format.format_calls(message.calls)}
    return message.for_template()


def _introduction(use: ToolUse) -> str:
    """Return the text that describes the tools, and how to call them."""
    tools = "\n".join(json.dumps(function.for_template()) for function in use.functions)
    example = use.call_format.format_calls([("name of the tool", {"name of an argument": "its value"})])
    return _INTRODUCTION.format(tools=tools, example=example)


def _new_calls(events: list[Event]) -> list[ToolCall]:
    """Return the new part of each call. Only the first part of a call has an id and a name."""
    calls: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, CallStart):
            called = CalledTool(event.name, "")
            calls[event.index] = ToolCall(called, new_id("call"), "function", event.index)
        elif isinstance(event, ArgumentsDelta):
            call = calls.setdefault(event.index, ToolCall(CalledTool(), index=event.index))
            call.function.arguments = (call.function.arguments or "") + event.text
    return list(calls.values())


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
        tokenizer, call_format = context.prompts.tokenizer, call_format_of(context)
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, call_format)
        tags = reasoning_format(context.settings.reasoning_parser, tokenizer)
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
            end = ""  # the tag of the reasoning format
            if self.use is not None and params.structured is None:
                end = self.use.call_format.reasoning_end  # in some formats, another tag ends it before calls
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
        reasoning, self._use = conversation.reasoning, conversation.use
        self._reasoning_reader = None if reasoning is None else ReasoningReader(reasoning)
        self._call_reader = None if self._use is None else self._use.reader()

    def feed(self, text: str, is_end: bool) -> AnswerPart:
        """Parse new text of the answer."""
        reasoning = ""
        if self._reasoning_reader is not None:
            reasoning, text = self._reasoning_reader.feed(text, is_end)
        if self._call_reader is None:
            return AnswerPart(text, [], reasoning)
        events = self._call_reader.feed(text)
        if is_end:
            events += self._call_reader.finish()
        new_text = "".join(event.text for event in events if isinstance(event, TextDelta))
        return AnswerPart(new_text, _new_calls(events), reasoning)

    def whole(self, text: str) -> AnswerPart:
        """Parse a whole answer."""
        part = self.feed(text, is_end=True)
        for call in part.calls:
            call.index = UNSET
        if part.calls or (self._use is not None and self._use.choice == "required"):
            return replace(part, text=(part.text or "").strip() or None)
        return part

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the client's finish reason, given the engine's: "tool_calls" after calls.

        As in OpenAI's API, the engine's reason remains if the request names the tool; also if the last call is cut.
        """
        use, reader = self._use, self._call_reader
        if use is None or reader is None:
            return reason
        ends_with_calls = reason == "stop" and reader.count > 0 and not reader.is_cut and not use.is_named
        return "tool_calls" if ends_with_calls else reason
