"""Ollama's routes `/api/...`, converted to and from OpenAI's routes."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foreword import __version__
from foreword.server.api.bodies import load_object, object_at, read_body
from foreword.server.api.chat import CHAT
from foreword.server.api.completions import completion_job
from foreword.server.api.entry import AnswerRoute, Conversion, answer_converted, json_answer, refusing_handler
from foreword.server.api.foreign_fields import GENERATING
from foreword.server.api.ollama_answers import OllamaDialect, loaded
from foreword.server.api.reasoning import reasoning_format
from foreword.server.api.request_types import OllamaCompletion
from foreword.server.api.sampling_types import SamplingFields
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError
from foreword.server.model_files import ModelFiles

Json = dict[str, Any]

RAW: AnswerRoute[OllamaCompletion] = AnswerRoute(OllamaCompletion, completion_job)

_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Ollama's names of sampling parameters -> this server's, where they differ."""

_OPTION_FIELDS = {"max_tokens", *SamplingFields.model_fields, *GENERATING} - {"model", "stream"}
"""Fields that `options` can set: not the model, and not whether the answer is streamed."""

_MODELS = "this server has one model, which it was started with"
_UNSUPPORTED = {
    "/embed": "this server generates text and has no embeddings",
    "/embeddings": "this server generates text and has no embeddings",
    "/pull": f"{_MODELS}; fetch others with foreword pull",
    "/create": _MODELS,
    "/copy": _MODELS,
    "/push": _MODELS,
    "/delete": _MODELS,
}
"""Ollama's routes that are not implemented, and the alternative."""


def ollama_routes(context: ServerContext) -> APIRouter:
    """Return the routes of Ollama's API."""
    router = APIRouter(prefix="/api")

    @router.post("/chat")
    async def chat(request: Request) -> Response:
        """Answer a conversation in Ollama's format."""
        return await answer_converted(context, request, convert_chat)

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        """Answer a prompt, or continue a raw one, in Ollama's format."""
        return await answer_converted(context, request, convert_generate)

    @router.get("/ps")
    @router.get("/tags")
    async def tags() -> Response:
        """List the model and its LoRA adapters, all of which are loaded."""
        names = (context.settings.model_name, *sorted(context.adapters))
        files = context.settings.model_files
        about = {
            "modified_at": _modified_at(files),
            "size": files.size,
            "digest": files.digest,
            "details": _details(files),
            "expires_at": None,
            "context_length": _context_length(context),
        }
        return json_answer({"models": [{"name": name, "model": name, **about} for name in names]})

    @router.post("/show")
    async def show(request: Request) -> Response:
        """Describe a model."""
        limits = context.settings.limits
        body = load_object(await read_body(request, limits), limits)
        given = body.get("model") or body.get("name")
        if not given:
            raise ApiError(400, "is missing", param="model")
        name = _plain_name(given)
        context.check_model(name)
        return json_answer(_description(context, name))

    @router.get("/version")
    async def version() -> Response:
        """Return this server's version, which is not a version of Ollama."""
        return json_answer({"version": __version__})

    for path, instead in _UNSUPPORTED.items():
        refuse = refusing_handler(f"/api{path}", instead)
        router.add_api_route(path, refuse, methods=["POST", "DELETE"], include_in_schema=False)
    return router


def _details(files: ModelFiles) -> Json:
    return {
        "parent_model": "",
        "format": files.file_format,
        "family": files.family,
        "families": [files.family],
        "parameter_size": _rounded(files.parameters),
        "quantization_level": files.weight_format or "unknown",
    }


def _rounded(parameters: int) -> str:
    """Return a number of weights as Ollama writes it, such as 134.5M."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters)


def _modified_at(files: ModelFiles) -> str:
    return datetime.fromtimestamp(files.modified, UTC).isoformat().replace("+00:00", "Z")


def _context_length(context: ServerContext) -> int | None:
    """Return the context length; while the engine starts, the one that the model's files allow."""
    return context.engine.max_model_len or context.settings.model_files.context_length


def _description(context: ServerContext, name: str) -> Json:
    files = context.settings.model_files
    tokenizer = context.prompts.tokenizer
    has_reasoning = reasoning_format(context.settings.reasoning_parser, tokenizer) is not None
    capabilities = {
        "completion": True,
        "tools": True,
        "insert": tokenizer.fill is not None,
        "thinking": has_reasoning,
    }
    return {
        "template": tokenizer.chat_template or "",
        "parameters": _parameter_lines(context.settings.sampling.values),
        "model_info": {
            "general.architecture": files.family,
            "general.name": name,
            "general.parameter_count": files.parameters,
            f"{files.family}.context_length": _context_length(context),
        },
        "capabilities": [name for name, has in capabilities.items() if has],
        "details": _details(files),
        "modified_at": _modified_at(files),
    }


def _parameter_lines(values: Mapping[str, float]) -> str:
    """Return sampling parameters as Ollama shows them: one per line, under its names."""
    names = {name: given for given, name in _OPTIONS.items()}
    return "\n".join(f"{names.get(name, name):<30} {value:g}" for name, value in values.items())


def _plain_name(name: object) -> str:
    """Return a model's name without Ollama's default tag."""
    if not isinstance(name, str):
        raise ApiError(400, "model: must be a text", param="model")
    return name.removesuffix(":latest")


def convert_chat(value: Json) -> Conversion | Json:
    """Return the chat request; without messages, the response to a request that only loads the model."""
    body, field_names = _converted(value, ("messages",))
    if value.get("messages") in (None, []):
        return loaded(body.get("model"), is_chat=True)
    body["messages"] = _messages(value["messages"], field_names)
    return Conversion(CHAT, body, field_names, partial(OllamaDialect, is_chat=True))


def convert_generate(value: Json) -> Conversion | Json:
    """Return the chat request; for a raw or fill-in-the-middle request, one of `/v1/completions`.

    Without a prompt, return the response to a request that only loads the model.
    """
    body, field_names = _converted(value, ("prompt", "system", "raw", "suffix"))
    for name, kind, words in (("prompt", str, "a text"), ("raw", bool, "true or false")):
        if not isinstance(value.get(name), kind | None):
            raise ApiError(400, f"{name}: must be {words}", param=name)
    prompt, system, suffix = value.get("prompt") or "", value.get("system"), value.get("suffix")
    if not prompt and not suffix:
        return loaded(body.get("model"), is_chat=False)
    make_dialect = partial(OllamaDialect, is_chat=False)
    if value.get("raw") or suffix:
        raw_body = {name: entry for name, entry in body.items() if name != "chat_template_kwargs"}
        raw_body |= {"prompt": prompt, "suffix": suffix, "system": system}
        if isinstance(value.get("logprobs"), bool):  # a number on OpenAI's route
            most = raw_body.pop("top_logprobs", None) or 0
            raw_body["logprobs"] = most if value["logprobs"] else None
        return Conversion(RAW, raw_body, field_names, make_dialect)
    system_messages = [{"role": "system", "content": system}] if system else []
    body["messages"] = [*system_messages, {"role": "user", "content": prompt}]
    field_names |= {"messages": "prompt", f"messages.{len(system_messages)}.content": "prompt"}
    if system_messages:
        field_names["messages.0.content"] = "system"
    return Conversion(CHAT, body, field_names, make_dialect)


def _converted(value: Json, route_fields: tuple[str, ...]) -> tuple[Json, dict[str, str]]:
    """Return the body of OpenAI's route, and the field names: OpenAI's -> Ollama's.

    `route_fields` are fields that only one of Ollama's routes has; its caller converts them.
    """
    left_out = (*route_fields, "options", "format", "think", "keep_alive", "stream")
    body = {name: entry for name, entry in value.items() if name not in left_out}
    if value.get("model") is not None:
        body["model"] = _plain_name(value["model"])
    body["stream"] = True if value.get("stream") is None else value["stream"]
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    field_names = {"response_format": "format"}
    if value.get("options") is not None:
        _add_options(object_at("options", value["options"]), body, field_names)
    if value.get("format"):
        body["response_format"] = _response_format(value["format"])
    if value.get("think") is not None:
        body["chat_template_kwargs"] = _thinking(value["think"])
    return body, field_names


def _add_options(options: Json, body: Json, field_names: dict[str, str]) -> None:
    """Add the options to the body under this server's names; unknown ones are then reported as ignored."""
    for given, entry in options.items():
        name = _OPTIONS.get(given, given)
        # Ollama's values for no limit (-1), a limit at the context length (-2), and a random seed (-1).
        is_default = entry in (-1, -2) and given in ("num_predict", "seed")
        if name not in _OPTION_FIELDS:
            body[f"options.{given}"] = entry
        elif not is_default:
            body[name] = entry
            field_names[name] = f"options.{given}"


def _response_format(value: object) -> Json:
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise ApiError(400, 'format: must be "json" or a JSON schema', param="format")
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _thinking(think: object) -> Json:
    if not isinstance(think, bool | str):
        raise ApiError(400, "think: must be true, false or an effort such as high", param="think")
    effort = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {"enable_thinking": bool(think), **effort}


def _messages(value: object, field_names: dict[str, str]) -> object:
    """Return messages in OpenAI's format, and add the names of their fields: OpenAI's -> Ollama's.

    Ollama's calls have no ids, so results are matched to calls in order.
    """
    if not isinstance(value, list):
        raise ApiError(400, "messages: must be a list", param="messages")
    unanswered: list[Json] = []  # calls without a result
    messages = []
    for number, given in enumerate(value):
        message = dict(object_at(f"messages.{number}", given))
        if (thought := message.pop("thinking", None)) is not None:
            message["reasoning_content"] = thought
            field_names[f"messages.{number}.reasoning_content"] = f"messages.{number}.thinking"
        if (tool := message.pop("tool_name", None)) is not None:
            message["name"] = tool
            field_names[f"messages.{number}.name"] = f"messages.{number}.tool_name"
        if isinstance(message.get("tool_calls"), list):
            calls = [_call(f"call_{number}_{n}", call) for n, call in enumerate(message["tool_calls"])]
            unanswered += [call for call in calls if isinstance(call, _Call)]
            message["tool_calls"] = calls
        elif message.get("role") == "tool" and not message.get("tool_call_id"):
            message["tool_call_id"] = _pop_answered(unanswered, message.get("name"))
        messages.append(message)
    return messages


class _Call(dict[str, Any]):
    """A tool call in OpenAI's format. Invalid calls, which are passed on unchanged, do not have this type."""


def _call(call_id: str, value: object) -> object:
    """Return a call in OpenAI's format; return an invalid one unchanged, since validation refuses it."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        return value
    given = function.get("arguments")
    written = given if isinstance(given, str) else json.dumps({} if given is None else given)
    named = {"id": value.get("id") or call_id, "type": "function"}
    return _Call(named, function={"name": function.get("name"), "arguments": written})


def _pop_answered(unanswered: list[Json], name: object) -> str:
    """Remove the call that a tool's message answers, and return its id; without calls, an id that no call has.

    It is the first call of the tool that the message names, otherwise the first call.
    """
    if not unanswered:
        return "call"
    index = next((n for n, call in enumerate(unanswered) if call["function"]["name"] == name), 0)
    return str(unanswered.pop(index)["id"])
