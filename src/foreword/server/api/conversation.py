"""A conversation in the model's template, and the parser of its answers: reasoning, text and tool calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import NewRequest
from foreword.server.api.answer_types import ToolCall
from foreword.server.api.entry import new_request
from foreword.server.api.identity import ApiCaller
from foreword.server.api.message_types import Message
from foreword.server.api.reasoning import Reasoning, ReasoningReader, check_budget, reasoning_format
from foreword.server.api.request_types import ChatRequest, ResponsesRequest, ToolFields
from foreword.server.api.tool_use import ToolUse, ToolWriter, chosen_format, shown_messages, tool_use
from foreword.server.context import ServerContext


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
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> "Conversation":
        """Apply the model's template to messages and tools."""
        tokenizer, settings = context.prompts.tokenizer, context.settings
        form = chosen_format(settings.tool_call_parser, tokenizer)
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, form)
        thinks = reasoning_format(settings.reasoning_parser, tokenizer)
        check_budget(body.thinking_token_budget, thinks)
        ids = await context.prompts.chat(
            shown_messages(messages, use, form, tokenizer.takes_tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=use.shown() if use is not None and tokenizer.takes_tools else None,
            variables=variables,
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
        """Return the new part."""
        reasoning, text = self._apart(text, is_end)
        if self._calls is None:
            return AnswerPart(text, [], reasoning)
        return AnswerPart(*self._calls.feed(text, is_end), reasoning)

    def whole(self, text: str) -> AnswerPart:
        """Return the whole answer."""
        reasoning, text = self._apart(text, is_end=True)
        return AnswerPart(*((text, []) if self._calls is None else self._calls.whole(text)), reasoning)

    def finish_reason(self, reason: str | None) -> str | None:
        return reason if self._calls is None else self._calls.finish_reason(reason)

    def _apart(self, text: str, is_end: bool) -> tuple[str, str]:
        return ("", text) if self._thinks is None else self._thinks.feed(text, is_end)
