"""Assembles and runs the router's HTTP server: listen, watch targets, forward, drain, exit.

A router's targets are the Foreword servers to which it forwards requests.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx2
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foreword import __version__
from foreword.server.admission import Admission
from foreword.server.api.bodies import read_body
from foreword.server.connections import (
    LAST_BYTES_SECONDS,
    WebServer,
    limit_repeated_logs,
    listening_url,
    on_loop_error,
)
from foreword.server.errors import ApiError, install_error_handlers
from foreword.server.middleware import AuthMiddleware, OriginMiddleware, RequestLogMiddleware, caller_of
from foreword.server.page import PAGE_PATHS
from foreword.server.router.relay import Relay, RelayedResponse, RouterMetrics
from foreword.server.router.targets import Targets, TargetWatch
from foreword.server.settings import ServerSettings

_OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
_OLLAMA = ("/api/chat", "/api/generate", "/api/show")
BODY_ROUTES = (*_OPENAI, *_ANTHROPIC, *_OLLAMA, "/generate", "/tokenize", "/detokenize")
"""Routes with a body that any target can answer."""

_LISTS = ("/v1/models", "/v1/models/{name:path}", "/api/tags", "/api/ps", "/api/version")
READ_ROUTES = (*sorted(PAGE_PATHS), "/page/settings", "/openapi.json", *_LISTS)
"""Routes without a body that any target can answer."""

_LEARNING = ("/learn", "/learn/tenants/{tenant}")
TARGET_ROUTES = ("/speculation", "/advise", *_LEARNING, "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Routes that concern a single target. The router refuses these, since the client could not choose the target."""


def create_router_app(
    settings: ServerSettings, targets: Targets, relay: Relay, metrics: RouterMetrics
) -> FastAPI:
    """Create the app with the routes that are forwarded and those that the router answers itself."""
    app = FastAPI(
        title="Foreword router", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )

    async def forward_with_body(request: Request) -> Response:
        return RelayedResponse(relay, request, await read_body(request, settings.limits))

    async def forward(request: Request) -> Response:
        return RelayedResponse(relay, request)

    async def refuse(request: Request) -> Response:
        raise ApiError(
            404,
            f"{request.url.path} concerns a single target: send the request to that target, not to the router",
        )

    async def health(request: Request) -> Response:
        return JSONResponse(_health(targets, caller_of(request).trusted))

    async def ready(request: Request) -> Response:
        is_ready = any(target.is_ready for target in targets)
        return JSONResponse({"status": "ready" if is_ready else "no target"}, 200 if is_ready else 503)

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.exposition(targets), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    routes: list[tuple[Sequence[str], Callable[[Request], Awaitable[Response]], list[str]]] = [
        (["/health"], health, ["GET", "HEAD"]),
        (["/ready"], ready, ["GET", "HEAD"]),
        (["/metrics"], show_metrics, ["GET"]),
        (["/version"], version, ["GET"]),
        (BODY_ROUTES, forward_with_body, ["POST"]),
        (READ_ROUTES, forward, ["GET"]),
        (TARGET_ROUTES, refuse, ["GET", "POST", "DELETE"]),
    ]
    for paths, handler, methods in routes:
        for path in paths:
            app.add_route(path, handler, methods)
    install_error_handlers(app, metrics.note_refusal)
    app.add_middleware(AuthMiddleware, settings=settings, on_refusal=metrics.note_refusal)
    app.add_middleware(OriginMiddleware, settings=settings, on_refusal=metrics.note_refusal)
    app.add_middleware(RequestLogMiddleware, settings=settings)
    return app


def _health(targets: Targets, trusted: bool) -> dict[str, object]:
    """Return the router's state; for trusted callers, also the targets and their load."""
    is_ready = any(target.is_ready for target in targets)
    health: dict[str, object] = {"status": "ok" if is_ready else "no target"}
    if trusted:
        names = ("url", "state", "reason", "load", "in_flight", "answered")
        health["targets"] = [{name: getattr(target, name) for name in names} for target in targets]
    return health


log = logging.getLogger("foreword.router")

CONNECT_SECONDS = 5.0
"""Timeout of connecting to a target."""


def keep_alive_options() -> list[tuple[int, int, int]]:
    """Return (level, option, value) of socket options that detect a lost host, since answers have no time limit.

    It is detected after 10 idle seconds and 3 probes of 5 seconds.
    """
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # macOS
    values = {idle: 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_NODELAY": 1}
    options = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in values.items()]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *options]


def open_targets_client() -> httpx2.AsyncClient:
    """Create the client for requests to targets, without limits of connections and answer times, or proxies."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
        transport=httpx2.AsyncHTTPTransport(limits=limits, socket_options=keep_alive_options()),
        trust_env=False,
    )


@dataclass
class RouterRun:
    """Runs a router until a signal arrives."""

    settings: ServerSettings
    targets: Targets
    listening: socket.socket  # bound and listening
    _stop_requested: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Forward requests until a signal arrives; `on_ready` receives the URL once all targets were checked."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(on_loop_error)
        limit_repeated_logs()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._stop_requested.set)
        admission, metrics = Admission(self.settings.limits), RouterMetrics()
        async with open_targets_client() as client:
            key = next(iter(self.settings.api_keys), "")  # the targets accept the router's keys
            watch = TargetWatch(self.targets, client, key)
            relay = Relay(self.targets, client, admission, metrics)
            app = create_router_app(self.settings, self.targets, relay, metrics)
            web = WebServer(app, self.settings.limits)
            await watch.poll()
            tasks = [
                asyncio.create_task(web.serve(sockets=[self.listening])),
                asyncio.create_task(watch.run()),
                asyncio.create_task(self._stop_requested.wait()),
            ]
            on_ready(listening_url(self.listening))
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises the error of a task that failed
                await self._drain(admission)
            finally:
                web.should_exit = True  # ends the first task
                for task in tasks[1:]:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, admission: Admission) -> None:
        """Refuse new requests, and wait for forwarded ones until the timeout."""
        admission.close()
        log.info("stopping: waiting for %d answers to finish", admission.in_flight)
        if not await admission.wait_idle(self.settings.drain_seconds + LAST_BYTES_SECONDS):
            log.warning("aborting %d answers that did not finish in time", admission.in_flight)
