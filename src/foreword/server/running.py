"""One server from start to end: listen, load, serve, drain, exit."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from foreword.errors import RequestError
from foreword.models.tokenizer import Tokenizer
from foreword.server.app import create_app, create_context
from foreword.server.context import ServerContext
from foreword.server.settings import ServerSettings
from foreword.server.supervisor import Supervisor, SupervisorSettings

log = logging.getLogger("foreword.server")

_LAST_BYTES_SECONDS = 5  # after the last answer: for clients to take it


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free

    def check(self, has_key: bool, insecure: bool) -> None:
        """Refuse to be reachable from other machines without a key, unless that is what is wanted."""
        if not (has_key or insecure or _is_loopback(self.host)):
            raise RequestError(
                f"{self.host} can be reached from other machines: give an API key (--api-key or FOREWORD_API_KEY), "
                "or --insecure if you mean it"
            )

    def bind(self) -> socket.socket:
        """A listening socket."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            listening.close()
            raise RequestError(f"cannot listen on {self.host} port {self.port}: {error}") from None
        listening.listen(1024)
        return listening


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handling: it would end the process by the signal, not with exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to us."""
        yield


class ServerRun:
    """Runs until a signal."""

    def __init__(
        self,
        settings: ServerSettings,
        supervision: SupervisorSettings,
        tokenizer: Tokenizer,
        address: Address,
    ) -> None:
        self._settings = settings
        self._supervision = supervision
        self._tokenizer = tokenizer
        self._address = address
        self._stopping = asyncio.Event()

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Serve; `on_ready` is called with the server's URL when the engine takes requests."""
        listening = self._address.bind()
        supervisor = Supervisor(self._supervision)
        context = create_context(self._settings, supervisor, self._tokenizer)
        web = _Uvicorn(self._uvicorn_config(context))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, supervisor)
        serving = asyncio.create_task(web.serve(sockets=[listening]))
        starting = asyncio.create_task(supervisor.start(lambda: on_ready(_url(listening))))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((serving, starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # an engine that cannot start at all ends the server
                await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
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
            await context.admission.wait_idle(_LAST_BYTES_SECONDS)

    def _on_signal(self, supervisor: Supervisor) -> None:
        """The first asks to stop in peace, the second to give up what runs."""
        if self._stopping.is_set():
            supervisor.abort_all()
        self._stopping.set()

    def _uvicorn_config(self, context: ServerContext) -> uvicorn.Config:
        return uvicorn.Config(
            create_app(context),
            http="h11",  # it bounds headers; the other does not
            h11_max_incomplete_event_size=2 * self._settings.limits.header_bytes,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
        )


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
