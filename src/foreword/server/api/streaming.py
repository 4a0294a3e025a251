"""Streaming responses, and handling of clients that disconnect."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreword.server.api.pacing import COMMENT, EvenCadence, PaceMemory, Padder
from foreword.server.errors import ANTHROPIC, OLLAMA, RESPONSES, ApiError

log = logging.getLogger("foreword.server")

Result = TypeVar("Result")


def event(value: object) -> bytes:
    """Return a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _named_event(value: object) -> bytes:
    """Return a server-sent event with its type as name; an error of `/v1/responses` has none."""
    assert isinstance(value, dict)
    return f"event: {value.get('type', 'error')}\n".encode() + event(value)


def _line(value: object) -> bytes:
    """Return a line of an NDJSON stream."""
    return msgspec.json.encode(value) + b"\n"


class Framing(NamedTuple):
    """How a stream encodes its events."""

    write: Callable[[object], bytes]  # returns an event's bytes
    end: bytes = b""  # bytes after the last event
    media_type: str = "text/event-stream"
    blank: tuple[bytes, bytes] = COMMENT  # start and end of padding that clients ignore


def framing_of(path: str) -> Framing:
    """Return the encoding of the API to which a path belongs."""
    if path.startswith(OLLAMA):
        return Framing(_line, media_type="application/x-ndjson", blank=(b"", b""))
    if path.startswith((ANTHROPIC, RESPONSES)):
        return Framing(_named_event)
    return Framing(event, b"data: [DONE]\n\n")


class StreamPart(NamedTuple):
    """Events that are sent for one delta of the engine, or at the end."""

    units: list[bytes]  # complete events; with even pacing, one for each token
    is_end: bool = False  # whether it is the stream's last part


async def send_at_once(parts: AsyncGenerator[StreamPart, None]) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of each part when it arrives."""
    async with aclosing(parts):
        async for part in parts:
            yield b"".join(part.units)


async def send_evenly(
    parts: AsyncGenerator[StreamPart, None], memory: PaceMemory, blank: tuple[bytes, bytes] = COMMENT
) -> AsyncGenerator[bytes, None]:
    """Yield blocks of equal size: one for the first part, then one at each tick of `EvenCadence`.

    To an observer of the connection, the sizes and times of the blocks reveal little about the tokens.
    """
    clock, cadence, padder = asyncio.get_running_loop().time, EvenCadence(memory), Padder(around=blank)
    async with aclosing(parts):
        first = await anext(parts)
        cadence.arrived(clock(), len(first.units))
        yield padder.padded(b"".join(first.units))
        waiting: deque[bytes] = deque()
        changed = asyncio.Event()
        collecting = asyncio.ensure_future(_collect(parts, waiting, cadence, changed))
        try:
            while waiting or not collecting.done():
                while cadence.due is None:  # the rate may be unknown until a later part
                    changed.clear()
                    await changed.wait()
                await asyncio.sleep(max(cadence.due - clock(), 0))
                count = cadence.take(clock(), len(waiting))
                events = b"".join(waiting.popleft() for _ in range(count))
                yield padder.padded(events, is_last=cadence.has_ended and not waiting)
            collecting.result()
        finally:
            await _end(collecting)


async def _collect(
    parts: AsyncGenerator[StreamPart, None],
    waiting: "deque[bytes]",
    cadence: EvenCadence,
    changed: asyncio.Event,
) -> None:
    """Append the events of all parts to `waiting` as they arrive, and inform the cadence; then set `changed`."""
    clock = asyncio.get_running_loop().time
    try:
        async for part in parts:
            waiting.extend(part.units)
            if not part.is_end:
                cadence.arrived(clock(), len(part.units))
            changed.set()
    finally:
        cadence.ended(clock(), len(waiting))
        changed.set()


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; if the client disconnects first, cancel it and raise `ApiError` 499."""
    task = asyncio.ensure_future(work)
    disconnection = asyncio.ensure_future(_disconnection(request.receive))
    try:
        await asyncio.wait((task, disconnection), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client has disconnected")
    finally:
        await _end(disconnection)
        await _end(task)


async def _disconnection(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its cleanup; ignore its exception."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class EventStream(Response):
    """A response that sends events as they arrive, and closes their source when the client disconnects."""

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], admission: ExitStack, media_type: str
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._admission = admission  # released when the stream has ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        disconnection = asyncio.ensure_future(_disconnection(receive))
        try:
            await asyncio.wait((sending, disconnection), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and (error := sending.exception()) is not None and not disconnection.done():
                log.error("a stream failed", exc_info=error)
        finally:
            await _end(disconnection)
            await _end(sending)
            await self._rest.aclose()
            self._admission.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for part in self._rest:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
