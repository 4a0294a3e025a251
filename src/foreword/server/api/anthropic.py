"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, converted to and from OpenAI's chat route."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from foreword.engine.messages import AnswerDelta
from foreword.engine.outputs import Answer, Costs
from foreword.server.api.answer_types import AnswerUsage, ChatDelta, ChatMessage, Completion, ToolCall, new_id
from foreword.server.api.answering import AnswerJob
from foreword.server.api.bodies import object_at
from foreword.server.api.chat import CHAT, ChatDialect, chat_conversation
from foreword.server.api.entry import Conversion, answer_converted, converted_body, json_answer
from foreword.server.api.message_types import no_text
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError

Json = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}  # all others: the answer was cut


class MessagesDialect:
    """Formats chat answers as one Anthropic message, or its stream events."""

    def __init__(self, job: AnswerJob) -> None:
        assert isinstance(job.dialect, ChatDialect)
        self._inner = job.dialect
        self._prompt_tokens = len(job.requests[0].prompt_token_ids)
        self._id = new_id("msg")
        self._index = -1  # index of the newest block
        self._open: tuple[str, int] | None = None  # type of the open block, and index of its call
        self._has_calls = False
        self._end: Json = {}  # fields of the answer's end

    def opening(self) -> Iterable[Json]:
        *_, first = self._inner.opening()
        message = self._message(first, [], AnswerUsage(self._prompt_tokens, 0, self._prompt_tokens))
        yield {"type": "message_start", "message": message}

    def chunk(self, choice: int, delta: AnswerDelta) -> list[Json]:
        frame = self._inner.chunk(choice, delta)
        if frame is None:
            return []
        gained = frame.choices[0]
        new = gained.delta
        assert isinstance(new, ChatDelta)
        calls = new.tool_calls or []
        events: list[Json] = []
        if new.reasoning_content:
            events += self._piece("thinking", {"type": "thinking_delta", "thinking": new.reasoning_content})
        for call in [one for one in calls if one.id is UNSET]:  # continues the open call
            events += self._call_events(call)
        if new.content:
            events += self._piece("text", {"type": "text_delta", "text": new.content})
        for call in [one for one in calls if one.id is not UNSET]:
            events += self._call_events(call)
        if gained.finish_reason is not None:
            self._end = self._stop_fields(frame, gained.finish_reason, gained.stop_reason)
        return events

    def closing(self) -> Iterable[Json]:
        yield from self._close()
        (last,) = self._inner.closing()
        assert isinstance(last.usage, AnswerUsage)
        ended = {name: self._end.pop(name) for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": _usage(last.usage), **self._end}
        yield {"type": "message_stop"}

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Json:
        frame = self._inner.whole(answers, costs)
        choice = frame.choices[0]
        message = choice.message
        assert isinstance(message, ChatMessage)
        content: list[Json] = []
        if message.reasoning_content:
            content.append(_block("thinking") | {"thinking": message.reasoning_content})
        if message.content:
            content.append({"type": "text", "text": message.content})
        for call in message.tool_calls or []:
            self._has_calls = True
            content.append(_block("tool_use", call) | {"input": call.function.parsed()})
        assert isinstance(frame.usage, AnswerUsage)
        answer = self._message(frame, content, frame.usage)
        return answer | self._stop_fields(frame, choice.finish_reason, choice.stop_reason)

    def _message(self, frame: Completion, content: list[Json], usage: AnswerUsage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": frame.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _stop_fields(self, frame: Completion, reason: str | None, stop: int | str | None) -> Json:
        """Return the fields of an answer's end: stop reason, stop sequence, and this server's own fields."""
        sequence = stop if isinstance(stop, str) else None
        name = _STOP_REASONS.get(reason or "", "max_tokens")
        if name == "end_turn":
            name = "stop_sequence" if sequence is not None else "tool_use" if self._has_calls else name
        extras = {"timings": frame.timings, "speculation": frame.speculation}
        shown = {key: value for key, value in extras.items() if value is not UNSET}
        return {"stop_reason": name, "stop_sequence": sequence, **shown}

    def _call_events(self, call: ToolCall) -> list[Json]:
        self._has_calls = True
        given = {"type": "input_json_delta", "partial_json": call.function.arguments or ""}
        return self._piece("tool_use", given, call)

    def _piece(self, kind: str, delta: Json, call: ToolCall | None = None) -> list[Json]:
        """Return the events for more text or arguments, starting a block if necessary."""
        place = (kind, call.index if call is not None and isinstance(call.index, int) else 0)
        events = []
        if self._open != place:
            events += self._close()
            self._open, self._index = place, self._index + 1
            start = {"index": self._index, "content_block": _block(kind, call)}
            events.append({"type": "content_block_start", **start})
        return [*events, {"type": "content_block_delta", "index": self._index, "delta": delta}]

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]


def _block(kind: str, call: ToolCall | None = None) -> Json:
    """Return a block's initial state."""
    if call is not None:
        return {"type": kind, "id": call.id, "name": call.function.name, "input": {}}
    return {"type": kind, **({"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""})}


def _usage(counted: AnswerUsage) -> Json:
    details = counted.prompt_tokens_details
    cached = 0 if details is UNSET else details["cached_tokens"]
    return {
        "input_tokens": counted.prompt_tokens - cached,
        "output_tokens": counted.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def anthropic_routes(context: ServerContext) -> APIRouter:
    router = APIRouter(prefix="/v1/messages")

    @router.post("")
    async def messages(request: Request) -> Response:
        """Answer a conversation in Anthropic's format."""
        return await answer_converted(context, request, _messages)

    @router.post("/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation in Anthropic's format."""
        body = await converted_body(context, request, convert)
        conversation = await chat_conversation(context, body)
        return json_answer({"input_tokens": len(conversation.ids)})

    return router


def _messages(value: Json) -> Conversion:
    if value.get("max_tokens") is None:
        raise ApiError(400, "max_tokens: is missing; give the maximum number of tokens", param="max_tokens")
    return convert(value)


def convert(value: Json) -> Conversion:
    """Convert to a request of OpenAI's chat route; common and unknown fields are unchanged."""
    given = _MessageConverter(value)
    own = ("system", "messages", "stop_sequences", "tools", "tool_choice", "thinking", "output_config")
    body = {name: entry for name, entry in value.items() if name not in own}
    if value.get("stream"):
        body["stream_options"] = {"include_usage": True}
    if "stop_sequences" in value:
        body["stop"] = value["stop_sequences"] or None
    if isinstance(body.get("metadata"), dict):  # user_id may be null
        body["metadata"] = {name: entry for name, entry in body["metadata"].items() if entry is not None}
    given.add_messages()
    body["messages"] = given.messages
    last = given.messages[-1]
    if last.get("role") == "assistant" and last.get("content") and "tool_calls" not in last:
        body["continue_final_message"] = True
    if value.get("tools") is not None:
        body["tools"] = given.tools()
    body |= _tool_choice(value.get("tool_choice")) | _thinking(value.get("thinking"))
    body |= _output_config(value.get("output_config"))
    return Conversion(CHAT, body, given.field_names, MessagesDialect)


@dataclass
class _MessageConverter:
    """Messages and tools in OpenAI's format, with the field that each comes from."""

    value: Json
    messages: list[Json] = field(default_factory=list)
    field_names: dict[str, str] = field(
        default_factory=lambda: {
            "stop": "stop_sequences",
            "parallel_tool_calls": "tool_choice",
            "thinking_token_budget": "thinking.budget_tokens",
            "response_format": "output_config.format",
        }
    )

    def add_messages(self) -> None:
        if self.value.get("system"):
            self._add("system", {"role": "system", "content": _texts("system", self.value["system"])})
        for number, message in enumerate(_list("messages", self.value.get("messages"))):
            place = f"messages.{number}"
            if isinstance(object_at(place, message).get("content"), list):
                self._add_blocks(place, message)
            else:
                self._add(place, message)

    def _add(self, place: str, message: Json) -> None:
        self.field_names[f"messages.{len(self.messages)}"] = place
        self.messages.append(message)

    def _add_blocks(self, place: str, message: Json) -> None:
        """Add a message's blocks: a tool result becomes its own message, the rest stays together."""
        converted: Json = {"role": message.get("role"), "content": []}
        for number, block in enumerate(message["content"]):
            where = f"{place}.content.{number}"
            kind = object_at(where, block).get("type")
            if kind == "tool_result":
                if converted["content"]:
                    self._add(place, converted)
                    converted = {"role": converted["role"], "content": []}
                answered = _texts(f"{where}.content", block.get("content"))
                result = {"tool_call_id": _text(where, block, "tool_use_id"), "content": answered}
                self._add(where, {"role": "tool", **result})
            elif kind == "tool_use":
                called = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
                calls = converted.setdefault("tool_calls", [])
                at = f"messages.{len(self.messages)}.tool_calls.{len(calls)}"
                self.field_names |= {
                    at: where,
                    f"{at}.function": where,
                    f"{at}.function.arguments": f"{where}.input",
                }
                calls.append({"id": block.get("id"), "function": called})
            elif kind == "thinking":
                thought = converted.get("reasoning_content", "") + _text(where, block, "thinking")
                converted["reasoning_content"] = thought
            elif kind != "redacted_thinking":
                converted["content"].append(_text_part(where, block))
        is_result = bool(self.messages) and self.messages[-1]["role"] == "tool" and message["content"]
        if converted["content"] or "tool_calls" in converted or not is_result:
            self._add(place, converted)

    def tools(self) -> list[Json]:
        found = []
        for number, tool in enumerate(_list("tools", self.value["tools"])):
            place = f"tools.{number}"
            if object_at(place, tool).get("type", "custom") not in (None, "custom"):
                raise ApiError(
                    400,
                    f"{place}.type: this server runs no tools; give one of type custom",
                    param=f"{place}.type",
                )
            at = f"{place}.function"
            self.field_names |= {at: place, f"{at}.parameters": f"{place}.input_schema"}
            function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
            function["parameters"] = tool.get("input_schema")
            found.append({"type": "function", "function": function})
        return found


def _list(place: str, value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"{place}: must be a list that is not empty", param=place)
    return value


def _text(place: str, block: Json, name: str) -> str:
    if not isinstance(block.get(name), str):
        raise ApiError(400, f"{place}.{name}: must be a text", param=f"{place}.{name}")
    text: str = block[name]
    return text


def _texts(place: str, content: object) -> list[Json]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list):
        raise ApiError(400, f"{place}: must be a text or a list of blocks", param=place)
    return [_text_part(f"{place}.{number}", block) for number, block in enumerate(content)]


def _text_part(place: str, block: object) -> Json:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text" or not isinstance(block, dict):
        raise ApiError(400, f"{place}: is {no_text(kind)}", param=place)
    return {"type": "text", "text": _text(place, block, "text")}


def _tool_choice(value: object) -> Json:
    if value is None:
        return {}
    kind = object_at("tool_choice", value).get("type")
    if kind not in ("tool", *_CHOICES):
        raise ApiError(400, "tool_choice.type: must be auto, any, tool or none", param="tool_choice.type")
    assert isinstance(value, dict)
    named = {"type": "function", "function": {"name": value.get("name")}}
    parallel = {"parallel_tool_calls": False} if value.get("disable_parallel_tool_use") else {}
    return {"tool_choice": named if kind == "tool" else _CHOICES[kind], **parallel}


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
    form = None if value is None else object_at("output_config", value).get("format")
    if form is None:
        return {}
    schema = object_at("output_config.format", form).get("schema")
    return {"response_format": {"type": form.get("type"), "json_schema": {"schema": schema}}}
