"""OpenAI's routes."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foreword.server.api.chat import chat_job, check_chat
from foreword.server.api.completions import check_completion, completion_job
from foreword.server.api.entry import answer_request, json_answer, takes
from foreword.server.api.responses import check_responses, responses_job
from foreword.server.api.routes.adapters import add_adapter_routes
from foreword.server.api.types.openai_types import ChatRequest, CompletionRequest
from foreword.server.api.types.responses_types import ResponsesRequest
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError

_NOT_HERE = {
    "/embeddings": "this server generates text and has no embeddings",
    "/moderations": "this server generates text and judges none",
    "/audio/speech": "this server generates text only",
    "/audio/transcriptions": "this server takes text only",
    "/images/generations": "this server generates text only",
}
"""OpenAI's routes that clients look for, and what to do instead."""


def _refuser(path: str, instead: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ApiError(501, f"/v1{path} is not implemented: {instead}", code="not_implemented")

    return refuse


def openai_routes(context: ServerContext) -> APIRouter:
    """`/v1/...`."""
    router = APIRouter(prefix="/v1")

    @router.post("/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await answer_request(context, request, CompletionRequest, check_completion, completion_job)

    @router.post("/chat/completions", openapi_extra=takes(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await answer_request(context, request, ChatRequest, check_chat, chat_job)

    @router.post("/responses", openapi_extra=takes(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation, in OpenAI's newest form; nothing is kept."""
        return await answer_request(context, request, ResponsesRequest, check_responses, responses_job)

    for path, instead in _NOT_HERE.items():
        router.add_api_route(path, _refuser(path, instead), methods=["POST"], include_in_schema=False)

    @router.get("/models")
    async def models() -> Response:
        """The model, and its LoRA adapters."""
        names = ("", *sorted(context.adapters))
        return json_answer({"object": "list", "data": [_model(context, name) for name in names]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        """One of them by name."""
        if not name:
            raise ApiError(404, "name a model")
        context.check_model(name)
        return json_answer(_model(context, context.adapter(name)))

    add_adapter_routes(router, context)
    return router


def _model(context: ServerContext, adapter: str) -> dict[str, object]:
    known: dict[str, object] = {
        "id": adapter or context.settings.model_name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "foreword",
        "parent": context.settings.model_name if adapter else None,
    }
    longest = context.max_model_len
    return known if longest is None else known | {"max_model_len": longest}
