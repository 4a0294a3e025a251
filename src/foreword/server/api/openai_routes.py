"""OpenAI's routes, and the one way that every request for answers goes."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from foreword.server.api.answering import Job, respond
from foreword.server.api.bodies import parse_body, read_body
from foreword.server.api.chat import chat_job, check_chat
from foreword.server.api.completions import check_completion, completion_job
from foreword.server.api.identity import Caller, caller_of
from foreword.server.api.openai_types import ChatRequest, CompletionRequest
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError
from foreword.server.settings import ServerSettings
from foreword.wire.client import EngineState, EngineUnavailable

Body = TypeVar("Body", bound=BaseModel)


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """The body's schema for the OpenAPI page; the body itself is read and checked by us, not by FastAPI."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema)}}}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its definitions in the places that refer to them."""
    definitions = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(definitions[value["$ref"].rsplit("/", 1)[1]])
            return {key: resolve(entry) for key, entry in value.items()}
        return [resolve(entry) for entry in value] if isinstance(value, list) else value

    resolved: dict[str, Any] = resolve(schema)
    return resolved


async def answer_request(
    context: ServerContext,
    request: Request,
    model: type[Body],
    check: Callable[[Body, ServerSettings], int],
    prepare: Callable[[ServerContext, Body, Caller], Awaitable[Job]],
) -> Response:
    """Read, check, admit, encode, answer. What is refused is refused at the first of these that finds a fault."""
    limits = context.settings.limits
    data = await read_body(request, limits)
    context.admission.check(1)
    body = await parse_body(data, model, limits)
    context.check_model(getattr(body, "model", None))
    answers = check(body, context.settings)
    if context.engine.state in (EngineState.STARTING, EngineState.RESTARTING, EngineState.STOPPED):
        raise EngineUnavailable(f"the engine is {context.engine.state}; try again")
    with ExitStack() as places:
        places.enter_context(context.admission.admit(answers))
        job = await prepare(context, body, caller_of(request))
        return await respond(context, request, job, places)


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

    @router.get("/models")
    async def models() -> Response:
        """The one model that this server has."""
        return _json({"object": "list", "data": [_model(context)]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        """The same by name."""
        if not name:
            raise ApiError(404, "name a model")
        context.check_model(name)
        return _json(_model(context))

    return router


def _model(context: ServerContext) -> dict[str, object]:
    known: dict[str, object] = {
        "id": context.settings.model_name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "foreword",
    }
    try:
        return known | {"max_model_len": context.engine.limits().max_model_len}
    except EngineUnavailable:
        return known


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
