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
from foreword.server.connections import LAST_BYTES_SECONDS, WebServer, listening_url, on_loop_error, quieten
from foreword.server.context import ServerContext
from foreword.server.errors import install_error_handlers
from foreword.server.metrics import Metrics
from foreword.server.middleware import AuthMiddleware, HeadMiddleware, OriginMiddleware, RequestLogMiddleware
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
    """Create the ASGI application. Its page loads nothing external; `/openapi.json` describes the rest."""
    app = FastAPI(title="Foreword", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(openai_routes(context))
    app.include_router(anthropic_routes(context))
    app.include_router(ollama_routes(context))
    app.include_router(foreword_routes(context))
    app.include_router(ops_routes(context))
    app.include_router(speculation_routes(context))
    app.include_router(page_routes(context))
    install_error_handlers(app, context.metrics.note_refusal)
    # The last one added sees a request first.
    app.add_middleware(HeadMiddleware)
    app.add_middleware(AuthMiddleware, settings=context.settings, on_refusal=context.metrics.note_refusal)
    app.add_middleware(OriginMiddleware, settings=context.settings, on_refusal=context.metrics.note_refusal)
    app.add_middleware(RequestLogMiddleware, settings=context.settings)
    return app


log = logging.getLogger("foreword.server")


@dataclass
class ServerRun:
    """Runs a server until a signal."""

    settings: ServerSettings
    supervision: SupervisorSettings
    tokenizer: Tokenizer
    listening: socket.socket
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(
        self, on_ready: Callable[[str, int], None], on_stage: StageProgress = lambda *_: None
    ) -> None:
        """Serve until a signal arrives.

        `on_stage` reports loading progress; `on_ready` receives URL and `max_model_len`.
        """
        supervisor = Supervisor(self.supervision, on_stage)
        context = create_context(self.settings, supervisor, self.tokenizer)
        web = WebServer(create_app(context), self.settings.limits)
        quieten()
        gc.collect()
        gc.freeze()  # exclude imported objects from garbage collection between tokens
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, supervisor)
        serving = asyncio.create_task(web.serve(sockets=[self.listening]))
        url = listening_url(self.listening)
        starting = asyncio.create_task(supervisor.start(lambda: on_ready(url, supervisor.max_model_len or 0)))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((serving, starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # an engine that cannot start ends the server
                await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            await self._drain(context, supervisor)
        finally:
            web.should_exit = True
            stopping.cancel()
            await supervisor.stop()
            await asyncio.gather(serving, starting, return_exceptions=True)
            context.prompts.close()

    async def _drain(self, context: ServerContext, supervisor: Supervisor) -> None:
        """Refuse new requests; wait for accepted ones until the timeout, then abort them."""
        supervisor.begin_drain()
        context.admission.close()
        log.info("stopping: %d answers to finish", context.admission.in_flight)
        if not await context.admission.wait_idle(self.settings.drain_seconds):
            log.warning("giving up %d answers: the time to finish is over", context.admission.in_flight)
            supervisor.abort_all()
            await context.admission.wait_idle(LAST_BYTES_SECONDS)

    def _on_signal(self, supervisor: Supervisor) -> None:
        """Drain on the first signal; abort running answers on the second."""
        if self._stopping.is_set():
            supervisor.abort_all()
        self._stopping.set()
