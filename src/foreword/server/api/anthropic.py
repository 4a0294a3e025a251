"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, converted to and from OpenAI's chat route."""

import json
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foreword.server.api.anthropic_answers import MessagesDialect
from foreword.server.api.bodies import object_at
from foreword.server.api.chat import CHAT, chat_conversation
from foreword.server.api.entry import Conversion, answer_converted, converted_body, json_answer
from foreword.server.api.message_types import no_text
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError

Json = dict[str, Any]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def anthropic_routes(context: ServerContext) -> APIRouter:
    """`/v1/messages...`."""
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
    given = _Given(value)
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
    return Conversion(CHAT, body, given.places, MessagesDialect)


@dataclass
class _Given:
    """Messages and tools in OpenAI's format, with the field that each comes from."""

    value: Json
    messages: list[Json] = field(default_factory=list)
    places: dict[str, str] = field(
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
        self.places[f"messages.{len(self.messages)}"] = place
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
                self.places |= {
                    at: where,
                    f"{at}.function": where,
                    f"{at}.function.arguments": f"{where}.input",
                }
                calls.append({"id": block.get("id"), "function": called})
            elif kind == "thinking":
                converted["reasoning_content"] = converted.get("reasoning_content", "") + _text(
                    where, block, "thinking"
                )
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
            self.places |= {at: place, f"{at}.parameters": f"{place}.input_schema"}
            function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
            found.append(
                {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}
            )
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
    """Return the text parts of a content, which is a string or blocks."""
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
