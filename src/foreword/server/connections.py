"""Uvicorn with bounds: how many connections, how long they are silent, how slow, and how much they log."""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, ClassVar

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from foreword.server.errors import ApiError
from foreword.server.settings import Limits

_INTERVAL = 60.0  # seconds between two lines that say the same
_NOISY = ("uvicorn.error", "foreword.server.connections")

log = logging.getLogger("foreword.server.connections")


class OncePerMinute(logging.Filter):
    """Lets a message through once a minute, with the number of suppressed ones."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        kind, now = str(record.msg), self._clock()
        if now - self._last.get(kind, -_INTERVAL) < _INTERVAL:
            self._held[kind] = self._held.get(kind, 0) + 1
            return False
        self._last[kind] = now
        if held := self._held.pop(kind, 0):
            record.msg = f"{kind.rstrip()} ({held} more like this since the last such line)"
        return True


def quieten() -> None:
    """Limit the log lines that clients can cause."""
    for name in _NOISY:
        logger = logging.getLogger(name)
        if not any(isinstance(known, OncePerMinute) for known in logger.filters):
            logger.addFilter(OncePerMinute())


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Failures to accept a connection are a line, not a traceback each."""
    error = context.get("exception")
    if isinstance(error, OSError) and "accept" in str(context.get("message", "")):
        log.warning("a connection could not be accepted: %s", error)
    else:
        loop.default_exception_handler(context)


_OWN_FILES = 64  # descriptors that are kept for everything but connections
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    b'{"error": {"message": "the server has too many connections; try again", '
    b'"type": "service_unavailable_error", "param": null, "code": "too_many_connections"}}'
)


class ConnectionLimiter:
    """Keeps the number of connections bounded.

    Who comes when all places are taken displaces the connection that has been waiting for a request the longest: half
    a header, or none, keeps no place from others. Connections with a request in flight are never displaced.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[BoundedProtocol, None] = {}  # for a whole request head, the longest first
        self._busy: set[BoundedProtocol] = set()

    def opened(self, connection: "BoundedProtocol") -> bool:
        """Take a new connection, which waits; False if there is no place for it."""
        if len(self._waiting) + len(self._busy) >= self._most:
            log.warning("all %d connections are taken: those that ask nothing are closed", self._most)
            if not self._waiting:
                return False
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.abort()
        self._waiting[connection] = None
        return True

    def busy(self, connection: "BoundedProtocol") -> None:
        if connection in self._waiting:
            del self._waiting[connection]
            self._busy.add(connection)

    def idle(self, connection: "BoundedProtocol") -> None:
        """The request is answered; the connection waits for another."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._waiting[connection] = None

    def closed(self, connection: "BoundedProtocol") -> None:
        self._waiting.pop(connection, None)
        self._busy.discard(connection)


def capacity(limits: Limits) -> tuple[int, int]:
    """Return how many connections fit this process's file descriptors, and how many are accepted at once.

    The second is the number that is accepted before the event loop can close any.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        files = 1 << 20
    batch = max(1, min(32, files // 32))
    # A closed connection keeps its descriptor for some turns of the event loop; in each, others are accepted.
    spare = min(_OWN_FILES, files // 2) + 4 * batch
    return max(1, min(limits.connections, files - spare)), batch


class _Timer:
    """One call that is due, unless it is called off."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, loop: asyncio.AbstractEventLoop, seconds: float, call: Callable[[], None]) -> None:
        self.cancel()
        self._handle = loop.call_later(seconds, call)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = None


class CheckedConnection(h11.Connection):
    """Refuses a request with both `Content-Length` and `Transfer-Encoding` (RFC 9112, 6.3).

    h11 would read the body by the second. A proxy that reads it by the first would see another request begin inside.
    """

    refusal = "the request is not valid HTTP/1.1"  # what the client reads

    def next_event(self) -> Any:  # noqa: ANN401 - h11's
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                self.refusal = "send either Content-Length or Transfer-Encoding, not both"
                raise h11.RemoteProtocolError(self.refusal)
        return event


class BoundedProtocol(H11Protocol):
    """Uvicorn's HTTP with the limits that it lacks. `bounded_protocol` makes a class of it for one server."""

    conn: CheckedConnection

    limiter: ClassVar[ConnectionLimiter]
    limits: ClassVar[Limits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(*args, **kwargs)
        self.conn = CheckedConnection(h11.SERVER, 2 * self.limits.header_bytes)
        self._deadline = _Timer()  # for the head of a request
        self._stall = _Timer()  # for a client that does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, or refuse."""
        super().connection_made(transport)
        if self.limiter.opened(self):
            self._deadline.start(self.loop, self.limits.header_seconds, self.abort)
        else:
            transport.write(_REFUSAL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Read on; a head that does not become whole in time ends the connection."""
        super().data_received(data)
        if self._is_busy:
            self._deadline.cancel()
            self.limiter.busy(self)
        elif not (self._deadline.is_running or self.transport.is_closing()):
            self._deadline.start(self.loop, self.limits.header_seconds, self.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read as HTTP in the shape of all errors, and close: its end is unknown."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(ApiError(400, self.conn.refusal).body())
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request; a pipelined one is already in flight."""
        super().on_response_complete()
        if not self._is_busy:
            self.limiter.idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self._deadline.cancel()
        self._stall.cancel()
        self.limiter.closed(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read: its buffers are full."""
        super().pause_writing()
        self._stall.start(self.loop, self.limits.stall_seconds, self.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        self._stall.cancel()
        super().resume_writing()

    def abort(self) -> None:
        """Close the connection now."""
        self.transport.abort()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def bounded_protocol(limits: Limits, most: int) -> type[BoundedProtocol]:
    """The protocol of one server."""
    shared: dict[str, Any] = {"limiter": ConnectionLimiter(most), "limits": limits}
    return type("ServerProtocol", (BoundedProtocol,), shared)


LAST_BYTES_SECONDS = 5
"""After the last answer: for clients to take it."""

_KERNEL_QUEUE = 1024  # connections that wait to be accepted


class WebServer(uvicorn.Server):
    """Uvicorn with bounded connections, and without its signal handling.

    That would end the process by the signal, not with exit code 0.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        connections, at_once = capacity(limits)
        config = uvicorn.Config(
            app,
            http=bounded_protocol(limits, connections),
            timeout_keep_alive=round(limits.idle_seconds),
            backlog=at_once,
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
