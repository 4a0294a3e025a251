"""The HTTP side of a router."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foreword import __version__
from foreword.server.api.bodies import read_body
from foreword.server.api.identity import caller_of
from foreword.server.errors import ApiError, install_error_handlers
from foreword.server.ops.auth import AuthMiddleware
from foreword.server.ops.origins import OriginMiddleware
from foreword.server.ops.request_log import RequestLogMiddleware
from foreword.server.page.files import PAGE_PATHS
from foreword.server.router.metrics import RouterMetrics
from foreword.server.router.relay import Relay, Relayed
from foreword.server.router.targets import Targets
from foreword.server.settings import ServerSettings

_OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
ASKED = (*_OPENAI, "/generate", "/tokenize", "/detokenize")
"""Routes with a body that any target may answer."""

READ = (*sorted(PAGE_PATHS), "/page/settings", "/openapi.json", "/v1/models", "/v1/models/{name:path}")

OF_ONE_TARGET = ("/speculation", "/advise", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Routes that read or change one target: which one would be chance."""


def create_router_app(
    settings: ServerSettings, targets: Targets, relay: Relay, metrics: RouterMetrics
) -> FastAPI:
    """Routes that are passed on, and those of the router itself."""
    app = FastAPI(
        title="Foreword router", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )

    async def ask(request: Request) -> Response:
        return Relayed(relay, request, await read_body(request, settings.limits))

    async def read(request: Request) -> Response:
        return Relayed(relay, request)

    async def refuse(request: Request) -> Response:
        raise ApiError(404, f"{request.url.path} is a matter of each target: ask it there, not at the router")

    async def health(request: Request) -> Response:
        return JSONResponse(_health(targets, caller_of(request).trusted))

    async def ready(request: Request) -> Response:
        is_ready = any(target.is_ready for target in targets)
        return JSONResponse({"status": "ready" if is_ready else "no target"}, 200 if is_ready else 503)

    async def page(request: Request) -> Response:
        return Response(metrics.page(targets), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    def add(paths: tuple[str, ...], answer: Callable[[Request], Awaitable[Response]], *methods: str) -> None:
        for path in paths:
            app.add_route(path, answer, list(methods))

    add(("/health",), health, "GET", "HEAD")
    add(("/ready",), ready, "GET", "HEAD")
    add(("/metrics",), page, "GET")
    add(("/version",), version, "GET")
    add(ASKED, ask, "POST")
    add(READ, read, "GET")
    add(OF_ONE_TARGET, refuse, "GET", "POST")
    install_error_handlers(app, metrics.note_refusal)
    app.add_middleware(AuthMiddleware, settings=settings, on_refusal=metrics.note_refusal)
    app.add_middleware(OriginMiddleware, settings=settings, on_refusal=metrics.note_refusal)
    app.add_middleware(RequestLogMiddleware, settings=settings)
    return app


def _health(targets: Targets, trusted: bool) -> dict[str, object]:
    """The state for everybody; where targets are and what they do for those who may use them."""
    told: dict[str, object] = {"status": "ok" if any(one.is_ready for one in targets) else "no target"}
    if trusted:
        told["targets"] = [
            {
                "url": one.url,
                "state": one.state,
                "reason": one.reason,
                "load": one.load,
                "in_flight": one.in_flight,
                "answered": one.answered,
            }
            for one in targets
        ]
    return told
