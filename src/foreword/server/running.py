"""One server from start to end: listen, load, serve, drain, exit."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable

from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.progress import StageProgress
from foreword.server.app import create_app, create_context
from foreword.server.context import ServerContext
from foreword.server.quiet_log import on_loop_error, quieten
from foreword.server.settings import ServerSettings
from foreword.server.web import LAST_BYTES_SECONDS, WebServer, listening_url
from foreword.wire.supervisor import Supervisor, SupervisorSettings

log = logging.getLogger("foreword.server")


class ServerRun:
    """Runs until a signal."""

    def __init__(
        self,
        settings: ServerSettings,
        supervision: SupervisorSettings,
        tokenizer: Tokenizer,
        listening: socket.socket,
    ) -> None:
        self._settings = settings
        self._supervision = supervision
        self._tokenizer = tokenizer
        self._listening = listening
        self._stopping = asyncio.Event()

    async def run(
        self, on_ready: Callable[[str, int], None], on_stage: StageProgress = lambda *_: None
    ) -> None:
        """Serve until a signal comes.

        `on_stage` is called while the engine loads, `on_ready` with URL and `max_model_len` when it is ready.
        """
        listening = self._listening
        supervisor = Supervisor(self._supervision, on_stage)
        context = create_context(self._settings, supervisor, self._tokenizer)
        web = WebServer(create_app(context), self._settings.limits)
        quieten()
        gc.collect()
        gc.freeze()  # what is imported stays; the collector need not walk through all of it between two tokens
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, supervisor)
        serving = asyncio.create_task(web.serve(sockets=[listening]))
        starting = asyncio.create_task(
            supervisor.start(lambda: on_ready(listening_url(listening), supervisor.limits().max_model_len))
        )
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((serving, starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # an engine that cannot start at all ends the server
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
        """Take nothing new; let what was accepted end, or end it when the time is over."""
        supervisor.begin_drain()
        context.admission.close()
        log.info("stopping: %d answers to finish", context.admission.in_flight)
        if not await context.admission.wait_idle(self._settings.drain_seconds):
            log.warning("giving up %d answers: the time to finish is over", context.admission.in_flight)
            supervisor.abort_all()
            await context.admission.wait_idle(LAST_BYTES_SECONDS)

    def _on_signal(self, supervisor: Supervisor) -> None:
        """The first asks to stop in peace, the second to give up what runs."""
        if self._stopping.is_set():
            supervisor.abort_all()
        self._stopping.set()
