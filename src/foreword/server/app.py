"""Assembles and runs the HTTP server: listen, load, serve, drain, exit."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import FastAPI

from foreword import __version__
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.progress import StageProgress
from foreword.server.admission import Admission
from foreword.server.api.anthropic import anthropic_routes
from foreword.server.api.ollama import ollama_routes
from foreword.server.api.prompts import PromptEncoder
from foreword.server.api.routes import foreword_routes, openai_routes
from foreword.server.connections import (
    LAST_BYTES_SECONDS,
    WebServer,
    limit_repeated_logs,
    listening_url,
    on_loop_error,
)
from foreword.server.context import ServerContext
from foreword.server.errors import install_error_handlers
from foreword.server.learn_routes import learn_routes
from foreword.server.metrics import Metrics
from foreword.server.middleware import (
    AuthMiddleware,
    HeadMethodMiddleware,
    OriginMiddleware,
    RequestLogMiddleware,
)
from foreword.server.ops_routes import ops_routes, speculation_routes
from foreword.server.page import page_routes
from foreword.server.settings import ServerSettings
from foreword.wire.supervisor import Supervisor, SupervisorSettings


def create_context(settings: ServerSettings, engine: Supervisor, tokenizer: Tokenizer) -> ServerContext:
    return ServerContext(
        settings,
        engine,
        PromptEncoder(tokenizer, settings),
        Admission(settings.limits),
        Metrics(settings.model_name),
    )


def create_app(context: ServerContext) -> FastAPI:
    """Create the ASGI application.

    FastAPI's documentation pages are off, because they load scripts from a CDN; `/openapi.json` remains.
    """
    app = FastAPI(title="Foreword", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(openai_routes(context))
    app.include_router(anthropic_routes(context))
    app.include_router(ollama_routes(context))
    app.include_router(foreword_routes(context))
    app.include_router(ops_routes(context))
    app.include_router(speculation_routes(context))
    app.include_router(learn_routes(context))
    app.include_router(page_routes(context))
    install_error_handlers(app, context.metrics.note_refusal)
    # The middleware that is added last receives a request first.
    app.add_middleware(HeadMethodMiddleware)
    app.add_middleware(AuthMiddleware, settings=context.settings, on_refusal=context.metrics.note_refusal)
    app.add_middleware(OriginMiddleware, settings=context.settings, on_refusal=context.metrics.note_refusal)
    app.add_middleware(RequestLogMiddleware, settings=context.settings)
    return app


log = logging.getLogger("foreword.server")


@dataclass
class ServerRun:
    """Runs a server until a signal arrives."""

    settings: ServerSettings
    supervision: SupervisorSettings
    tokenizer: Tokenizer
    listening: socket.socket  # bound and listening
    _stop_requested: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(
        self, on_ready: Callable[[str, int], None], on_stage: StageProgress = lambda *_: None
    ) -> None:
        """Serve until a signal arrives.

        `on_stage` receives the loading progress; `on_ready` receives the URL and `max_model_len`.
        """
        supervisor = Supervisor(self.supervision, on_stage)
        context = create_context(self.settings, supervisor, self.tokenizer)
        web = WebServer(create_app(context), self.settings.limits)
        limit_repeated_logs()
        gc.collect()
        gc.freeze()  # later collections, which would delay tokens, skip all objects that exist by now
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(on_loop_error)
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._on_signal, supervisor)
        url = listening_url(self.listening)
        serve = asyncio.create_task(web.serve(sockets=[self.listening]))
        start = asyncio.create_task(supervisor.start(lambda: on_ready(url, supervisor.max_model_len or 0)))
        stop = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait((serve, start, stop), return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()  # an engine that cannot start ends the server
                await asyncio.wait((serve, stop), return_when=asyncio.FIRST_COMPLETED)
            if serve.done():
                serve.result()
            await self._drain(context, supervisor)
        finally:
            web.should_exit = True
            stop.cancel()
            await supervisor.stop()
            await asyncio.gather(serve, start, return_exceptions=True)
            context.prompts.close()

    async def _drain(self, context: ServerContext, supervisor: Supervisor) -> None:
        """Refuse new requests; wait for accepted ones until the timeout, then abort them."""
        supervisor.begin_drain()
        context.admission.close()
        log.info("stopping: waiting for %d answers to finish", context.admission.in_flight)
        if not await context.admission.wait_idle(self.settings.drain_seconds):
            log.warning("aborting %d answers that did not finish in time", context.admission.in_flight)
            supervisor.abort_all()
            await context.admission.wait_idle(LAST_BYTES_SECONDS)

    def _on_signal(self, supervisor: Supervisor) -> None:
        """Drain on the first signal; abort running answers on the second."""
        if self._stop_requested.is_set():
            supervisor.abort_all()
        self._stop_requested.set()
