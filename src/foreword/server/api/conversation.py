"""A conversation in the model's template, and the parser of its answers: reasoning, text and tool calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.answer_types import CalledTool, ToolCall, new_id
from foreword.server.api.entry import new_request
from foreword.server.api.message_types import NAMED, Message, Tool, ToolFunction
from foreword.server.api.reasoning import Reasoning, ReasoningReader, check_budget, reasoning_format
from foreword.server.api.request_types import ChatRequest, ResponsesRequest, ToolFields
from foreword.server.api.tool_blocks import FORMATS, CallFormat, format_of
from foreword.server.api.tool_reading import AUTO, ArgumentsDelta, CallStart, Event, TextDelta, ToolReading
from foreword.server.context import ServerContext
from foreword.server.middleware import ApiCaller
from foreword.structured.params import StructuredOutputs

_INTRODUCTION = """You may call tools. These are the tools, as JSON:
{tools}

To call one or more, answer with nothing but this, and do so only if it helps:
{example}"""


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call, and the constraints."""

    form: CallFormat
    functions: Sequence[ToolFunction]
    choice: str = "auto"  # or "required"; a named tool is required and the only one
    is_named: bool = False
    most: int | None = None  # maximum number of calls

    def reader(self) -> ToolReading:
        schemas = {function.name: function.argument_schema for function in self.functions}
        return self.form.reader(schemas, only_calls=self.choice == "required", most=self.most)

    def structured(self, other: StructuredOutputs | None) -> StructuredOutputs | None:
        """Return the grammar of the answer; `other` is the request's own format."""
        schemas = [(function.name, function.argument_schema) for function in self.functions]
        if self.choice == "required":
            if other is not None:
                raise RequestError(
                    "tool_choice and a response format exclude each other; leave one of them out",
                    "tool_choice",
                )
            return self.form.forced(schemas, self.most)
        if other is None and all(function.strict for function in self.functions):
            return self.form.allowed(schemas)
        return other

    def shown(self) -> list[dict[str, Any]]:
        """Return the tools for a chat template."""
        return [{"type": "function", "function": function.for_template()} for function in self.functions]


def tool_use(
    tools: Sequence[Tool] | None, choice: str | None, parallel: bool | None, form: CallFormat
) -> ToolUse | None:
    """Return the tools in use; None if none may be called."""
    functions = [tool.function for tool in tools or ()]
    if choice in ("required",) and not functions:
        raise RequestError("tool_choice: there are no tools; give some", "tool_choice")
    name = choice.removeprefix(NAMED) if choice is not None and choice.startswith(NAMED) else None
    if name is not None:
        functions = [function for function in functions if function.name == name]
        if not functions:
            raise RequestError(f"tool_choice: there is no tool {name[:64]!r}", "tool_choice")
        return ToolUse(form, functions, "required", is_named=True, most=1)
    if not functions or choice == "none":
        return None
    if len({function.name for function in functions}) < len(functions):
        raise RequestError("tools: two of them have the same name", "tools")
    return ToolUse(form, functions, choice or "auto", most=1 if parallel is False else None)


def chosen_format(parser: str, tokenizer: Tokenizer) -> CallFormat:
    return format_of(tokenizer.chat_template) if parser == AUTO else FORMATS[parser]


def shown_messages(
    messages: Sequence[Message], use: ToolUse | None, form: CallFormat, takes_tools: bool
) -> list[dict[str, Any]]:
    """Return the conversation for a chat template; without tool support, tools are described in text."""
    if takes_tools:
        return [message.for_template() for message in messages]
    shown = [_as_plain_message(message, form) for message in messages]
    if use is None:
        return shown
    if shown and shown[0]["role"] == "system":
        first = shown.pop(0)
        return [{**first, "content": f"{first['content']}\n\n{_introduction(use)}"}, *shown]
    return [{"role": "system", "content": _introduction(use)}, *shown]


def _as_plain_message(message: Message, form: CallFormat) -> dict[str, Any]:
    shown = message.for_template()
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.text}\n</tool_response>"}
    if message.tool_calls:
        text = f"{message.text}\n" if message.text else ""
        return {"role": "assistant", "content": text + form.written(message.calls)}
    return shown


def _introduction(use: ToolUse) -> str:
    tools = "\n".join(json.dumps(function.for_template()) for function in use.functions)
    example = use.form.written([("name of the tool", {"name of an argument": "its value"})])
    return _INTRODUCTION.format(tools=tools, example=example)


class ToolWriter:
    """Formats the tool calls of one answer, incrementally or as a whole."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._reader = use.reader()

    def feed(self, text: str, is_end: bool) -> tuple[str, list[ToolCall]]:
        """Return the new text, and the new part of each call."""
        events = self._reader.feed(text)
        if is_end:
            events += self._reader.finish()
        return _text_of(events), _parts(events)

    def whole(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """Return the whole answer: text (None if only calls) and calls."""
        events = [*self._reader.feed(text), *self._reader.finish()]
        calls = _parts(events)
        for call in calls:
            call.index = UNSET
        has_calls = bool(calls) or self._use.choice == "required"
        return _text_of(events).strip() or None if has_calls else _text_of(events), calls

    def finish_reason(self, reason: str | None) -> str | None:
        """Return "tool_calls" if the model chose to call or had to; not for a named tool or a call cut by a
        stop string."""
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
            before = part.function.arguments
            part.function.arguments = (before if isinstance(before, str) else "") + event.text
    return list(parts.values())


@dataclass(frozen=True)
class Conversation:
    """Token ids of a conversation, with its tools and reasoning format."""

    ids: list[int]
    use: ToolUse | None = None
    reasoning: Reasoning | None = None

    @staticmethod
    async def of(
        context: ServerContext,
        body: ToolFields,
        messages: Sequence[Message],
        **options: Any,  # noqa: ANN401 - of `Tokenizer.encode_chat`
    ) -> "Conversation":
        """Apply the model's template to messages and tools."""
        tokenizer, settings = context.prompts.tokenizer, context.settings
        form = chosen_format(settings.tool_call_parser, tokenizer)
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, form)
        thinks = reasoning_format(settings.reasoning_parser, tokenizer)
        check_budget(body.thinking_token_budget, thinks)
        ids = await context.prompts.chat(
            shown_messages(messages, use, form, tokenizer.takes_tools),
            use.shown() if use is not None and tokenizer.takes_tools else None,
            **options,
        )
        return Conversation(ids, use, Reasoning.after(ids, thinks, tokenizer))

    async def request(
        self, context: ServerContext, body: ChatRequest | ResponsesRequest, caller: ApiCaller, name: str
    ) -> NewRequest:
        """Return the engine's request, with the grammar that the tools require and the reasoning before it."""

        def constrain(params: SamplingParams) -> SamplingParams:
            structured = params.structured if self.use is None else self.use.structured(params.structured)
            budget = body.thinking_token_budget
            thinking = None if self.reasoning is None else self.reasoning.limit(budget, structured)
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
        self._thinks = None if conversation.reasoning is None else ReasoningReader(conversation.reasoning)
        self._calls = None if conversation.use is None else ToolWriter(conversation.use)

    def feed(self, text: str, is_end: bool) -> AnswerPart:
        reasoning, text = self._split_reasoning(text, is_end)
        if self._calls is None:
            return AnswerPart(text, [], reasoning)
        return AnswerPart(*self._calls.feed(text, is_end), reasoning)

    def whole(self, text: str) -> AnswerPart:
        reasoning, text = self._split_reasoning(text, is_end=True)
        return AnswerPart(*((text, []) if self._calls is None else self._calls.whole(text)), reasoning)

    def finish_reason(self, reason: str | None) -> str | None:
        return reason if self._calls is None else self._calls.finish_reason(reason)

    def _split_reasoning(self, text: str, is_end: bool) -> tuple[str, str]:
        return ("", text) if self._thinks is None else self._thinks.feed(text, is_end)
