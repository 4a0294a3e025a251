"""Uvicorn with limits on connections, idle and slow clients, and repeated log lines."""

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

_REPEAT_SECONDS = 60.0  # minimum time between two log lines with the same format string
_LIMITED_LOGGERS = ("uvicorn.error", "foreword.server.connections")

log = logging.getLogger("foreword.server.connections")


class OncePerMinute(logging.Filter):
    """Lets each log message through once a minute, with the number of messages that it has suppressed."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged_at: dict[str, float] = {}  # by format string
        self._suppressed: dict[str, int] = {}  # number of messages since then

    def filter(self, record: logging.LogRecord) -> bool:
        message, now = str(record.msg), self._clock()
        if now - self._logged_at.get(message, -_REPEAT_SECONDS) < _REPEAT_SECONDS:
            self._suppressed[message] = self._suppressed.get(message, 0) + 1
            return False
        self._logged_at[message] = now
        if count := self._suppressed.pop(message, 0):
            record.msg = f"{message.rstrip()} ({count} more like this since the last such line)"
        return True


def limit_repeated_logs() -> None:
    """Log equal errors of connections at most once a minute."""
    for name in _LIMITED_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(existing, OncePerMinute) for existing in logger.filters):
            logger.addFilter(OncePerMinute())


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an error of the event loop; if a connection could not be accepted, log one line without a traceback."""
    error = context.get("exception")
    if isinstance(error, OSError) and "accept" in str(context.get("message", "")):
        log.warning("a connection could not be accepted: %s", error)
    else:
        loop.default_exception_handler(context)


_OTHER_FILES = 64  # file descriptors reserved for other purposes than connections
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    b'{"error": {"message": "the server has too many connections; try again", '
    b'"type": "service_unavailable_error", "param": null, "code": "too_many_connections"}}'
)


class ConnectionLimiter:
    """Limits the number of connections.

    At the limit, a new connection replaces the one that has waited longest for a complete request header. Connections
    with a request in flight are never closed for a new one.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[BoundedProtocol, None] = {}  # for a request header; the longest wait is first
        self._busy: set[BoundedProtocol] = set()  # with a request in flight

    def add(self, connection: "BoundedProtocol") -> bool:
        """Register a new connection; at the limit, close a waiting one first. Return False if all are busy."""
        if len(self._waiting) + len(self._busy) >= self._limit:
            log.warning(
                "all %d connections are in use: connections without a request are closed", self._limit
            )
            if not self._waiting:
                return False
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.abort()
        self._waiting[connection] = None
        return True

    def mark_busy(self, connection: "BoundedProtocol") -> None:
        """Mark a waiting connection as having a request in flight."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._busy.add(connection)

    def mark_idle(self, connection: "BoundedProtocol") -> None:
        """Mark a busy connection as waiting for another request."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._waiting[connection] = None

    def remove(self, connection: "BoundedProtocol") -> None:
        self._waiting.pop(connection, None)
        self._busy.discard(connection)


def capacity(limits: Limits) -> tuple[int, int]:
    """Return the maximum number of open connections, and the maximum that the event loop accepts in one iteration.

    The maximum number of file descriptors of this process limits both.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        files = 1 << 20
    accepted = max(1, min(32, files // 32))
    # A closed connection keeps its descriptor for some iterations of the event loop, in which others are accepted.
    spare = min(_OTHER_FILES, files // 2) + 4 * accepted
    return max(1, min(limits.connections, files - spare)), accepted


class CheckedConnection(h11.Connection):
    """Refuses requests with both `Content-Length` and `Transfer-Encoding` (RFC 9112, 6.3).

    h11 uses Transfer-Encoding. A proxy that uses Content-Length would see another request inside the body (request
    smuggling).
    """

    refusal = "the request is not valid HTTP/1.1"  # error message for the client

    def next_event(self) -> Any:  # noqa: ANN401 - h11's
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                self.refusal = "send either Content-Length or Transfer-Encoding, not both"
                raise h11.RemoteProtocolError(self.refusal)
        return event


class BoundedProtocol(H11Protocol):
    """Uvicorn's HTTP protocol with additional limits; `bounded_protocol` creates a subclass per server."""

    conn: CheckedConnection

    limiter: ClassVar[ConnectionLimiter]
    limits: ClassVar[Limits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(*args, **kwargs)
        self.conn = CheckedConnection(h11.SERVER, 2 * self.limits.header_bytes)
        self._header_timer: asyncio.TimerHandle | None = None  # runs until a request header is complete
        self._stall_timer: asyncio.TimerHandle | None = None  # runs while the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limiter.add(self):
            self._header_timer = self.loop.call_later(self.limits.header_seconds, self.abort)
        else:
            transport.write(_REFUSAL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Process data. A timer ends the connection unless a request header is complete in time."""
        super().data_received(data)
        if self._is_busy:
            _cancel(self._header_timer)
            self._header_timer = None
            self.limiter.mark_busy(self)
        elif not (self._header_timer or self.transport.is_closing()):
            self._header_timer = self.loop.call_later(self.limits.header_seconds, self.abort)

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP in the server's error format, and close the connection."""
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
            self.limiter.mark_idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._header_timer)
        _cancel(self._stall_timer)
        self.limiter.remove(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the stall timer: the client does not read."""
        super().pause_writing()
        _cancel(self._stall_timer)
        self._stall_timer = self.loop.call_later(self.limits.stall_seconds, self.abort)

    def resume_writing(self) -> None:
        _cancel(self._stall_timer)
        super().resume_writing()

    def abort(self) -> None:
        self.transport.abort()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def bounded_protocol(limits: Limits, connections: int) -> type[BoundedProtocol]:
    """Return the protocol class of one server, with a limiter of `connections` connections."""
    shared: dict[str, Any] = {"limiter": ConnectionLimiter(connections), "limits": limits}
    return type("ServerProtocol", (BoundedProtocol,), shared)


LAST_BYTES_SECONDS = 5
"""Seconds for clients to read the end of the last answers when the server stops."""

_KERNEL_QUEUE = 1024  # maximum number of connections that wait to be accepted


class WebServer(uvicorn.Server):
    """Uvicorn with limited connections and without its signal handling.

    Uvicorn's signal handling would end the process by the signal instead of with exit code 0.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        connections, accepted = capacity(limits)
        config = uvicorn.Config(
            app,
            http=bounded_protocol(limits, connections),
            timeout_keep_alive=round(limits.idle_seconds),
            backlog=accepted,  # asyncio also accepts up to this number at a time
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
        """Start, and enlarge the kernel's backlog beyond the number of connections accepted at a time."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_KERNEL_QUEUE)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listening_url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
