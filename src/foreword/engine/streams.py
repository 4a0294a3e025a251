"""Answer streams for callers on event loops, and the registry through which the engine's thread finds them."""

import asyncio
import threading
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from foreword.engine.messages import AnswerDelta, OpenAnswers
from foreword.errors import RequestError


class AnswerStream:
    """The deltas of one request: `async for delta in stream`.

    The stream buffers deltas, so the engine never waits for the consumer. `aclose`, cancellation and leaving the loop
    early abort the request.
    """

    def __init__(self, request_id: str, answers: int, abort: "Callable[[AnswerStream], None]") -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.undelivered = OpenAnswers(answers)  # answers whose end the engine has not delivered
        self.is_aborted = False  # True: aborted before the request was queued; it ends once it is queued
        self._abort = abort
        self._open = OpenAnswers(answers)  # answers whose end the consumer has not received
        self._arrived: asyncio.Queue[AnswerDelta | Exception] = asyncio.Queue()
        self._take: Callable[[AnswerDelta | Exception], None] | None = None

    def forward_to(self, take: Callable[[AnswerDelta | Exception], None]) -> None:
        """Pass all deltas to `take` on the stream's loop, beginning with the buffered ones.

        A reader of many streams needs no task per stream this way.
        """
        self._take = take
        while self.has_more:
            self._hand_over(self._arrived.get_nowait())

    def deliver(self, item: AnswerDelta | Exception) -> None:
        """Deliver a delta or an exception. Must be called on the stream's own loop."""
        if self._take is not None:
            self._hand_over(item)
        else:
            self._arrived.put_nowait(item)

    def _hand_over(self, item: AnswerDelta | Exception) -> None:
        """Pass an item to the reader of `forward_to`, unless all answers have ended."""
        if self._take is not None and self._open.left:
            self._open.note(item)
            self._take(item)

    @property
    def has_more(self) -> bool:
        """Whether a delta is buffered."""
        return not self._arrived.empty()

    async def __aiter__(self) -> AsyncIterator[AnswerDelta]:
        try:
            while self._open.left:
                item = await self._arrived.get()
                self._open.note(item)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Abort the request unless all its answers have ended; may be repeated."""
        if self._open.left:
            self._open.left = 0
            self._abort(self)


def post(loop: asyncio.AbstractEventLoop, items: list[tuple[AnswerStream, AnswerDelta | Exception]]) -> bool:
    """Schedule the delivery of these items on the loop, thread-safe; return False if the loop is closed."""

    def deliver() -> None:
        for stream, item in items:
            stream.deliver(item)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        return False
    return True


@dataclass
class Listeners:
    """The registered streams by request id, shared between the engine's thread and its callers."""

    by_request: dict[str, AnswerStream] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: threading.Event = field(default_factory=threading.Event)  # set while no stream is registered
    closed: bool = False  # the engine drains or has ended: no stream can be added

    def add(self, stream: AnswerStream) -> bool:
        """Register a stream; return False if the engine accepts no more requests."""
        with self.lock:
            if self.closed:
                return False
            if stream.request_id in self.by_request:
                raise RequestError(
                    f"a request with the id {stream.request_id!r} is being answered; choose another id"
                )
            self.by_request[stream.request_id] = stream
            self.idle.clear()
            return True

    def stream_of(self, request_id: str) -> AnswerStream | None:
        with self.lock:
            return self.by_request.get(request_id)

    def has(self, stream: AnswerStream) -> bool:
        """Return whether this stream object is registered, not a later one with the same id."""
        return self.stream_of(stream.request_id) is stream

    def forget(self, stream: AnswerStream) -> bool:
        """Unregister a stream; return False if it was not registered."""
        with self.lock:
            is_registered = self.by_request.get(stream.request_id) is stream
            if is_registered:
                self._forget(stream.request_id)
            return is_registered

    def deliver(self, deltas: Sequence[AnswerDelta]) -> list[AnswerStream]:
        """Deliver deltas with one call per event loop; return the streams whose loop is closed.

        A stream is unregistered when all its answers have ended.
        """
        by_loop: dict[AbstractEventLoop, list[tuple[AnswerStream, AnswerDelta | Exception]]] = {}
        with self.lock:
            for delta in deltas:
                stream = self.by_request.get(delta.request_id)
                if stream is not None:
                    by_loop.setdefault(stream.loop, []).append((stream, delta))
                    if stream.undelivered.note(delta):
                        self._forget(delta.request_id)
        lost = [items for loop, items in by_loop.items() if not post(loop, items)]
        return [stream for items in lost for stream, _ in items]

    def close(self) -> None:
        """Refuse further streams."""
        with self.lock:
            self.closed = True

    def take_all(self) -> list[AnswerStream]:
        """Refuse further streams and unregister all; return those that were registered."""
        with self.lock:
            self.closed = True
            streams = list(self.by_request.values())
            self.by_request.clear()
            self.idle.set()
            return streams

    def _forget(self, request_id: str) -> None:
        del self.by_request[request_id]
        if not self.by_request:
            self.idle.set()
