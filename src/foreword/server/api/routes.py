"""OpenAI's routes and our own: `/v1/...`, `/generate`, `/tokenize`, `/detokenize`."""

from datetime import UTC, datetime

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foreword.server.api.chat import CHAT
from foreword.server.api.completions import COMPLETIONS
from foreword.server.api.conversation import call_format_of, shown_messages
from foreword.server.api.entry import answer_request, body_of, body_schema, json_answer, refusing_handler
from foreword.server.api.generate import GENERATE
from foreword.server.api.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from foreword.server.api.responses import RESPONSES
from foreword.server.api.sampling_types import StrictBody
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError

_BATCHES = "answer a file of requests with foreword batch in.jsonl out.jsonl"
_UNSUPPORTED = {
    "/embeddings": "this server generates text and has no embeddings",
    "/moderations": "this server generates text and does not classify it",
    "/audio/speech": "this server generates text only",
    "/audio/transcriptions": "this server takes text only",
    "/images/generations": "this server generates text only",
    "/files": _BATCHES,
    "/batches": _BATCHES,
    "/messages/batches": _BATCHES,
}
"""Routes of OpenAI and Anthropic that are not implemented, and the reason or an alternative."""


def openai_routes(context: ServerContext) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.post("/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await answer_request(context, request, COMPLETIONS)

    @router.post("/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await answer_request(context, request, CHAT)

    @router.post("/responses", openapi_extra=body_schema(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation through OpenAI's Responses API; nothing is stored."""
        return await answer_request(context, request, RESPONSES)

    for path, instead in _UNSUPPORTED.items():
        refuse = refusing_handler(f"/v1{path}", instead)
        router.add_api_route(path, refuse, methods=["GET", "POST"], include_in_schema=False)

    @router.get("/models")
    async def models(request: Request) -> Response:
        """List the model and its LoRA adapters."""
        adapters = ("", *sorted(context.adapters))  # "": the model itself
        entries = [_model(context, adapter, request) for adapter in adapters]
        page = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"], "has_more": False}
        return json_answer({"object": "list", "data": entries} | (page if _is_anthropic(request) else {}))

    @router.get("/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        """Return one model by name."""
        if not name:
            raise ApiError(404, "the path names no model; /v1/models lists the models")
        context.check_model(name)
        return json_answer(_model(context, context.adapter(name), request))

    add_adapter_routes(router, context)
    return router


def _is_anthropic(request: Request) -> bool:
    """Whether Anthropic's client sent the request: both APIs list models at the same path."""
    return "anthropic-version" in request.headers


def _model(context: ServerContext, adapter: str, request: Request) -> dict[str, object]:
    """Return the entry of an adapter, or of the model if `adapter` is empty, in the format of the client's API."""
    entry: dict[str, object] = {
        "id": adapter or context.settings.model_name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "foreword",
        "parent": context.settings.model_name if adapter else None,
    }
    max_model_len = context.engine.max_model_len
    if max_model_len is not None:
        entry["max_model_len"] = max_model_len
    if _is_anthropic(request):
        created = datetime.fromtimestamp(context.started_at, UTC).isoformat().replace("+00:00", "Z")
        entry |= {"type": "model", "display_name": entry["id"], "created_at": created, "lifecycle": "active"}
        entry |= {"max_input_tokens": max_model_len, "max_tokens": max_model_len}
    return entry


class LoadAdapter(StrictBody):
    """Body of a request to load an adapter."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)  # a folder on the server's machine


class UnloadAdapter(StrictBody):
    """Body of a request to unload an adapter."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None  # vLLM's; ignored


def add_adapter_routes(router: APIRouter, context: ServerContext) -> None:
    """Add the adapter routes, which the operator must enable, since they read paths that a client gives."""

    @router.post("/load_lora_adapter", openapi_extra=body_schema(LoadAdapter))
    async def load(request: Request) -> Response:
        """Load a LoRA adapter, which requests select as their model."""
        _check_allowed(context)
        body = await body_of(context, request, LoadAdapter, is_strict=True)
        if body.lora_name in (context.settings.model_name, *context.adapters):
            raise ApiError(400, f"there is a model {body.lora_name!r} already", param="lora_name")
        await context.engine.set_adapter(body.lora_name, body.lora_path)
        context.adapters.add(body.lora_name)
        return _text_answer(f"Success: LoRA adapter {body.lora_name!r} added successfully.")

    @router.post("/unload_lora_adapter", openapi_extra=body_schema(UnloadAdapter))
    async def unload(request: Request) -> Response:
        """Unload an adapter: new requests for it are refused, running ones finish."""
        _check_allowed(context)
        body = await body_of(context, request, UnloadAdapter, is_strict=True)
        if body.lora_name not in context.adapters:
            raise ApiError(404, f"there is no adapter {body.lora_name!r}", param="lora_name")
        await context.engine.set_adapter(body.lora_name, None)
        context.adapters.discard(body.lora_name)
        return _text_answer(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


def _check_allowed(context: ServerContext) -> None:
    if not context.settings.allow_adapter_loading:
        raise ApiError(403, "this server loads no adapters at run time; start it with --allow-lora-loading")


def _text_answer(line: str) -> Response:
    return Response(line, media_type="text/plain")


def foreword_routes(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/generate", openapi_extra=body_schema(GenerateRequest))
    async def generate(request: Request) -> Response:
        """Answer a prompt; fields have the names of the Python library."""
        return await answer_request(context, request, GENERATE)

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        body = await body_of(context, request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            takes_tools = context.prompts.tokenizer.takes_tools
            messages = shown_messages(body.messages, None, call_format_of(context), takes_tools)
            ids = await context.prompts.chat(messages, add_generation_prompt=body.add_generation_prompt)
        else:
            ids = await context.prompts.text(body.prompt or "", body)
        max_model_len = context.engine.max_model_len
        limit = {} if max_model_len is None else {"max_model_len": max_model_len}
        return json_answer({"tokens": ids, "count": len(ids)} | limit)

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        body = await body_of(context, request, DetokenizeRequest)
        text = await context.prompts.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return json_answer({"prompt": text})

    return router
