"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, converted to and from OpenAI's chat route."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from foreword.engine.messages import AnswerDelta
from foreword.engine.outputs import Answer, Costs
from foreword.server.api.answer_types import AnswerUsage, ChatDelta, ChatMessage, Completion, ToolCall, new_id
from foreword.server.api.answering import AnswerJob
from foreword.server.api.bodies import object_at, text_in
from foreword.server.api.call_format import is_object
from foreword.server.api.chat import CHAT, ChatDialect, chat_conversation
from foreword.server.api.entry import Conversion, answer_converted, json_answer, use_converted
from foreword.server.api.message_types import unsupported_part_text
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError

Json = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}
"""OpenAI's finish reason -> Anthropic's stop reason; for others, the answer was cut: "max_tokens"."""


class MessagesDialect:
    """Formats chat answers as an Anthropic message or its stream events, from what the chat route's dialect returns."""

    def __init__(self, job: AnswerJob) -> None:
        assert isinstance(job.dialect, ChatDialect)
        self._inner = job.dialect
        self._prompt_tokens = len(job.requests[0].prompt_token_ids)
        self._id = new_id("msg")
        self._index = -1  # index of the newest block
        self._open: tuple[str, int] | None = None  # the open block: its type, and the index of its call or 0
        self._arguments = ""  # arguments of the newest call so far
        self._end_fields: Json = {}

    def opening(self) -> Iterable[Json]:
        *_, first = self._inner.opening()
        message = self._message(first, [], AnswerUsage(self._prompt_tokens, 0, self._prompt_tokens))
        yield {"type": "message_start", "message": message}

    def chunk(self, choice: int, delta: AnswerDelta) -> list[Json]:
        completion = self._inner.chunk(choice, delta)
        if completion is None:
            return []
        part = completion.choices[0]
        new = part.delta
        assert isinstance(new, ChatDelta)
        calls = new.tool_calls or []
        events: list[Json] = []
        if new.reasoning_content:
            thinking = {"type": "thinking_delta", "thinking": new.reasoning_content}
            events += self._delta_events("thinking", thinking)
        # A call without an id continues the open block; text and new calls come after it.
        for call in [call for call in calls if call.id is UNSET]:
            events += self._call_events(call)
        if new.content:
            events += self._delta_events("text", {"type": "text_delta", "text": new.content})
        for call in [call for call in calls if call.id is not UNSET]:
            events += self._call_events(call)
        if part.finish_reason is not None:
            self._end_fields = self._stop_fields(completion, part.finish_reason, part.stop_reason)
        return events

    def closing(self) -> Iterable[Json]:
        yield from self._close()
        (last,) = self._inner.closing()
        assert isinstance(last.usage, AnswerUsage)
        stop = {name: self._end_fields.pop(name) for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": stop, "usage": _usage(last.usage), **self._end_fields}
        yield {"type": "message_stop"}

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Json:
        completion = self._inner.whole(answers, costs)
        choice = completion.choices[0]
        message = choice.message
        assert isinstance(message, ChatMessage)
        content: list[Json] = []
        if message.reasoning_content:
            content.append(_block("thinking") | {"thinking": message.reasoning_content})
        if message.content:
            content.append({"type": "text", "text": message.content})
        for call in message.tool_calls or []:
            self._arguments = call.function.arguments or ""
            content.append(_block("tool_use", call) | {"input": call.function.parsed()})
        assert isinstance(completion.usage, AnswerUsage)
        answer = self._message(completion, content, completion.usage)
        return answer | self._stop_fields(completion, choice.finish_reason, choice.stop_reason)

    def _message(self, completion: Completion, content: list[Json], usage: AnswerUsage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": completion.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _stop_fields(self, completion: Completion, reason: str | None, stop: int | str | None) -> Json:
        """Return the fields of an answer's end: stop reason, stop sequence, timings and speculation figures."""
        sequence = stop if isinstance(stop, str) else None
        name = _STOP_REASONS.get(reason or "", "max_tokens")
        if name == "end_turn" and sequence is not None:
            name = "stop_sequence"
        elif name == "end_turn" and is_object(
            self._arguments
        ):  # the last call is complete, so that it can be run
            name = "tool_use"
        extras = {"timings": completion.timings, "speculation": completion.speculation}
        given = {key: value for key, value in extras.items() if value is not UNSET}
        return {"stop_reason": name, "stop_sequence": sequence, **given}

    def _call_events(self, call: ToolCall) -> list[Json]:
        new = call.function.arguments or ""
        self._arguments = new if call.id is not UNSET else self._arguments + new
        delta = {"type": "input_json_delta", "partial_json": new}
        return self._delta_events("tool_use", delta, call)

    def _delta_events(self, kind: str, delta: Json, call: ToolCall | None = None) -> list[Json]:
        """Return the events for more text or arguments; if they are in another block, close the open one."""
        block = (kind, call.index if call is not None and isinstance(call.index, int) else 0)
        events = []
        if self._open != block:
            events += self._close()
            self._open, self._index = block, self._index + 1
            start = {"index": self._index, "content_block": _block(kind, call)}
            events.append({"type": "content_block_start", **start})
        return [*events, {"type": "content_block_delta", "index": self._index, "delta": delta}]

    def _close(self) -> list[Json]:
        """Close the open block; return its last event, or nothing if no block is open."""
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]


def _block(kind: str, call: ToolCall | None = None) -> Json:
    """Return a block's initial state."""
    if call is not None:
        return {"type": kind, "id": call.id, "name": call.function.name, "input": {}}
    return {"type": kind, **({"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""})}


def _usage(usage: AnswerUsage) -> Json:
    details = usage.prompt_tokens_details
    cached = 0 if details is UNSET else details["cached_tokens"]
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's tool choice -> OpenAI's."""


def anthropic_routes(context: ServerContext) -> APIRouter:
    router = APIRouter(prefix="/v1/messages")

    @router.post("")
    async def messages(request: Request) -> Response:
        """Answer a conversation in Anthropic's format."""
        return await answer_converted(context, request, _convert_messages)

    @router.post("/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation in Anthropic's format."""
        conversation = await use_converted(context, request, convert, partial(chat_conversation, context))
        return json_answer({"input_tokens": len(conversation.ids)})

    return router


def _convert_messages(value: Json) -> Conversion:
    """Return the result of `convert`; raise 400 without `max_tokens`, which only token counting does not require."""
    if value.get("max_tokens") is None:
        raise ApiError(400, "max_tokens: is missing; give the maximum number of tokens", param="max_tokens")
    return convert(value)


def convert(value: Json) -> Conversion:
    """Return the request of OpenAI's chat route; fields of both APIs and unknown fields stay unchanged."""
    converter = _MessageConverter(value)
    converted = ("system", "messages", "stop_sequences", "tools", "tool_choice", "thinking", "output_config")
    body = {name: entry for name, entry in value.items() if name not in converted}
    if value.get("stream"):
        body["stream_options"] = {"include_usage": True}
    if "stop_sequences" in value:
        body["stop"] = value["stop_sequences"] or None
    if isinstance(body.get("metadata"), dict):  # its user_id may be null, which OpenAI's API does not allow
        body["metadata"] = {name: entry for name, entry in body["metadata"].items() if entry is not None}
    converter.add_messages()
    body["messages"] = converter.messages
    last, content = converter.messages[-1], converter.messages[-1].get("content")
    has_text = any(part["text"] for part in content) if isinstance(content, list) else content
    if last.get("role") == "assistant" and has_text and "tool_calls" not in last:
        body["continue_final_message"] = True
    if value.get("tools") not in (None, []):
        body["tools"] = converter.tools()
    body |= _tool_choice(value.get("tool_choice")) | _thinking(value.get("thinking"))
    body |= _output_config(value.get("output_config"))
    return Conversion(CHAT, body, converter.field_names, MessagesDialect)


@dataclass
class _MessageConverter:
    """Converts messages and tools to OpenAI's format, and records which field each comes from."""

    value: Json  # Anthropic's request
    messages: list[Json] = field(default_factory=list)  # converted so far
    # Path of a field in OpenAI's format -> its path in Anthropic's.
    field_names: dict[str, str] = field(
        default_factory=lambda: {
            "stop": "stop_sequences",
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
            "thinking_token_budget": "thinking.budget_tokens",
            "response_format": "output_config.format",
        }
    )

    def add_messages(self) -> None:
        if self.value.get("system"):
            self._add("system", {"role": "system", "content": _text_parts("system", self.value["system"])})
        for number, message in enumerate(_non_empty_list("messages", self.value.get("messages"))):
            path = f"messages.{number}"
            if isinstance(object_at(path, message).get("content"), list):
                self._add_blocks(path, message)
            else:
                self._add(path, message)

    def _add(self, path: str, message: Json) -> None:
        self.field_names[f"messages.{len(self.messages)}"] = path
        self.messages.append(message)

    def _add_blocks(self, path: str, message: Json) -> None:
        """Add a message's blocks. Each tool result becomes a message; so do the other blocks between two results."""
        converted: Json = {"role": message.get("role"), "content": []}
        for number, block in enumerate(message["content"]):
            block_path = f"{path}.content.{number}"
            kind = object_at(block_path, block).get("type")
            if kind == "tool_result":
                if converted["content"] or len(converted) > 2:  # calls or reasoning
                    self._add(path, converted)
                    converted = {"role": converted["role"], "content": []}
                content = _text_parts(f"{block_path}.content", block.get("content"))
                call_id = text_in(block_path, block, "tool_use_id", may_be_empty=False)
                self._add(block_path, {"role": "tool", "tool_call_id": call_id, "content": content})
            elif kind == "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
                calls = converted.setdefault("tool_calls", [])
                call_path = f"messages.{len(self.messages)}.tool_calls.{len(calls)}"
                self.field_names |= {
                    call_path: block_path,
                    f"{call_path}.function": block_path,
                    f"{call_path}.function.arguments": f"{block_path}.input",
                }
                calls.append({"id": block.get("id"), "function": function})
            elif kind == "thinking":
                earlier = converted.get("reasoning_content", "")
                converted["reasoning_content"] = earlier + text_in(block_path, block, "thinking")
            elif kind != "redacted_thinking":
                converted["content"].append(_text_part(block_path, block))
        ends_with_result = bool(message["content"]) and message["content"][-1].get("type") == "tool_result"
        if converted["content"] or len(converted) > 2 or not ends_with_result:
            self._add(path, converted)

    def tools(self) -> list[Json]:
        converted = []
        for number, tool in enumerate(_non_empty_list("tools", self.value["tools"])):
            path = f"tools.{number}"
            if object_at(path, tool).get("type", "custom") not in (None, "custom"):
                reason = "the server runs no built-in tools; give only tools of type custom"
                raise ApiError(400, f"{path}.type: {reason}", param=f"{path}.type")
            function_path = f"{path}.function"
            self.field_names |= {function_path: path, f"{function_path}.parameters": f"{path}.input_schema"}
            function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
            function["parameters"] = tool.get("input_schema")
            converted.append({"type": "function", "function": function})
        return converted


def _non_empty_list(path: str, value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"{path}: must be a list that is not empty", param=path)
    return value


def _text_parts(path: str, content: object) -> list[Json]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list):
        raise ApiError(400, f"{path}: must be a text or a list of blocks", param=path)
    return [_text_part(f"{path}.{number}", block) for number, block in enumerate(content)]


def _text_part(path: str, block: object) -> Json:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text" or not isinstance(block, dict):
        raise ApiError(400, f"{path}: is {unsupported_part_text(kind)}", param=path)
    return {"type": "text", "text": text_in(path, block, "text")}


def _tool_choice(value: object) -> Json:
    if value is None:
        return {}
    kind = object_at("tool_choice", value).get("type")
    if kind not in ("tool", *_TOOL_CHOICES):
        raise ApiError(400, "tool_choice.type: must be auto, any, tool or none", param="tool_choice.type")
    assert isinstance(value, dict)
    name = text_in("tool_choice", value, "name") if kind == "tool" else None
    named = {"type": "function", "function": {"name": name}}
    disabled = value.get("disable_parallel_tool_use")
    parallel = {"parallel_tool_calls": False if disabled is True else disabled} if disabled else {}
    return {"tool_choice": named if kind == "tool" else _TOOL_CHOICES[kind], **parallel}


def _thinking(value: object) -> Json:
    if value is None:
        return {}
    kind = object_at("thinking", value).get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ApiError(400, "thinking.type: must be enabled, disabled or adaptive", param="thinking.type")
    assert isinstance(value, dict)
    budget = {"thinking_token_budget": value.get("budget_tokens")} if kind == "enabled" else {}
    return {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}, **budget}


def _output_config(value: object) -> Json:
    config = object_at("output_config", {} if value is None else value)
    body = {"reasoning_effort": config["effort"]} if "effort" in config else {}
    if config.get("format") is not None:
        given = object_at("output_config.format", config["format"])
        if given.get("type") == "json_schema":
            object_at("output_config.format.schema", given.get("schema"))
        body["response_format"] = {"type": given.get("type"), "json_schema": {"schema": given.get("schema")}}
    return body
