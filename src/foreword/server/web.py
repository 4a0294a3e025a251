"""Uvicorn, as this server uses it."""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from foreword.server.connections import Capacity, bounded_protocol
from foreword.server.settings import Limits

LAST_BYTES_SECONDS = 5
"""After the last answer: for clients to take it."""

_KERNEL_QUEUE = 1024  # connections that wait to be accepted


class WebServer(uvicorn.Server):
    """Uvicorn with bounded connections, and without its signal handling.

    That would end the process by the signal, not with exit code 0.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        capacity = Capacity.of(limits)
        config = uvicorn.Config(
            app,
            http=bounded_protocol(limits, capacity.connections),
            timeout_keep_alive=round(limits.idle_seconds),
            backlog=capacity.accept_batch,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_BYTES_SECONDS,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept few connections at a time, but let many wait: asyncio has one number for both."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_KERNEL_QUEUE)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listening_url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
