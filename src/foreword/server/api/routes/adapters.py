"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foreword.server.api.entry import body_of, takes
from foreword.server.api.types.sampling_types import StrictBody
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError


class LoadAdapter(StrictBody):
    """Which adapter, and what requests call it."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)  # a folder on the server's machine


class UnloadAdapter(StrictBody):
    """Which adapter."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None  # vLLM's; names are enough here


def add_adapter_routes(router: APIRouter, context: ServerContext) -> None:
    """They name folders of this machine, so that they are there only if the operator says so."""

    @router.post("/load_lora_adapter", openapi_extra=takes(LoadAdapter))
    async def load(request: Request) -> Response:
        """Load a LoRA adapter; requests ask for it as their model."""
        _check_allowed(context)
        body = await body_of(context, request, LoadAdapter, is_strict=True)
        if body.lora_name in (context.settings.model_name, *context.adapters):
            raise ApiError(400, f"there is a model {body.lora_name!r} already", param="lora_name")
        await context.engine.set_adapter(body.lora_name, body.lora_path)
        context.adapters.add(body.lora_name)
        return _told(f"Success: LoRA adapter {body.lora_name!r} added successfully.")

    @router.post("/unload_lora_adapter", openapi_extra=takes(UnloadAdapter))
    async def unload(request: Request) -> Response:
        """No new request gets it; those that have it end with it."""
        _check_allowed(context)
        body = await body_of(context, request, UnloadAdapter, is_strict=True)
        if body.lora_name not in context.adapters:
            raise ApiError(404, f"there is no adapter {body.lora_name!r}", param="lora_name")
        await context.engine.set_adapter(body.lora_name, None)
        context.adapters.discard(body.lora_name)
        return _told(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


def _check_allowed(context: ServerContext) -> None:
    if not context.settings.allow_adapter_loading:
        raise ApiError(403, "this server loads no adapters at run time; start it with --allow-lora-loading")


def _told(line: str) -> Response:
    return Response(line, media_type="text/plain")
