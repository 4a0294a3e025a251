"""One router from start to end: listen, watch, pass on, drain, exit."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

import httpx2

from foreword.server.ops.admission import Admission
from foreword.server.quiet_log import on_loop_error, quieten
from foreword.server.router.app import create_router_app
from foreword.server.router.metrics import RouterMetrics
from foreword.server.router.relay import Relay
from foreword.server.router.targets import Targets
from foreword.server.router.watching import Watch
from foreword.server.settings import ServerSettings
from foreword.server.web import LAST_BYTES_SECONDS, WebServer, listening_url

log = logging.getLogger("foreword.router")

CONNECT_SECONDS = 5.0

_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
"""A host that is gone without a word is known after some 25 seconds; how long an answer takes is nobody's guess."""


def open_targets_client() -> httpx2.AsyncClient:
    """No bound on connections or on the time of an answer; no proxies of the environment, no redirects."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
        transport=httpx2.AsyncHTTPTransport(limits=limits, socket_options=list(_ALIVE)),
        trust_env=False,
    )


class RouterRun:
    """Runs until a signal."""

    def __init__(self, settings: ServerSettings, targets: Targets, listening: socket.socket) -> None:
        self._settings = settings
        self._targets = targets
        self._listening = listening
        self._stopping = asyncio.Event()

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Pass requests on; `on_ready` is called with the router's URL when all targets were looked at once."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(on_loop_error)
        quieten()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        admission, metrics = Admission(self._settings.limits), RouterMetrics()
        async with open_targets_client() as client:
            key = next(iter(self._settings.api_keys), "")
            watch = Watch(self._targets, client, key)
            relay = Relay(self._targets, client, admission, metrics)
            app = create_router_app(self._settings, self._targets, relay, metrics)
            web = WebServer(app, self._settings.limits)
            await watch.look()
            tasks = [
                asyncio.create_task(web.serve(sockets=[self._listening])),
                asyncio.create_task(watch.run()),
                asyncio.create_task(self._stopping.wait()),
            ]
            on_ready(listening_url(self._listening))
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                await self._drain(admission)
            finally:
                web.should_exit = True
                for task in tasks[1:]:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, admission: Admission) -> None:
        """Take nothing new, and let what is under way end."""
        admission.close()
        log.info("stopping: %d answers to finish", admission.in_flight)
        if not await admission.wait_idle(self._settings.drain_seconds + LAST_BYTES_SECONDS):
            log.warning("giving up %d answers: the time to finish is over", admission.in_flight)
