"""Connection to an engine process: sends requests, and delivers the deltas of their answers."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from foreword.engine.messages import AnswerDelta, EngineStats, NewRequest, OpenAnswers
from foreword.errors import EngineUnavailable, RequestError
from foreword.progress import StageProgress
from foreword.wire import frames as wire

LONGEST_INTERVAL = 5.0  # maximum seconds between two checks of whether the engine hangs
HANG_CHECKS = 4  # minimum number of checks until the engine counts as hung


async def wait_until_hung(link: "EngineLink", timeout: float) -> None:
    """Return when the engine has not responded for `timeout` seconds, or has requests but made no step for so long."""
    interval = min(timeout / HANG_CHECKS, LONGEST_INTERVAL)
    clock = asyncio.get_running_loop().time
    steps, progress_at = -1, clock()
    while clock() - progress_at < timeout:
        await asyncio.sleep(interval / 2)
        stats = await link.stats(interval / 2)
        if stats is not None and (stats.steps != steps or not link.unfinished):
            steps, progress_at = stats.steps, clock()


DeltaOrError = AnswerDelta | Exception

OnLate = Callable[[DeltaOrError], None]
"""Receives the final deltas of aborted answers, or the exception that ended them."""


@dataclass
class _Inbox:
    """Queue of a request's deltas for its reader."""

    open: OpenAnswers  # which answers of the request have not ended
    items: "asyncio.Queue[DeltaOrError]" = field(default_factory=asyncio.Queue)


class EngineLink:
    """Connection to one engine process; exists as long as the process."""

    def __init__(self, channel: wire.Channel, on_stage: StageProgress = lambda *_: None) -> None:
        """`on_stage` receives the loading progress."""
        self._channel = channel
        self._on_stage = on_stage
        self._inboxes: dict[str, _Inbox] = {}  # by request id
        # Aborted requests whose answers have not ended, by request id.
        self._aborted: dict[str, tuple[OpenAnswers, OnLate]] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}  # awaited replies, by message number
        self._numbers = count()  # numbers of messages that have a reply
        self._broken: str | None = None  # why the link is broken; None: it works
        self.ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self.fatal: str | None = None  # error that ended the engine process; None: unknown

    @property
    def in_flight(self) -> int:
        """Number of requests with a reader."""
        return len(self._inboxes)

    @property
    def unfinished(self) -> int:
        """Number of requests that have a reader and whose answers have not all ended."""
        return sum(inbox.open.left > 0 for inbox in self._inboxes.values())

    def send(self, message: wire.ToEngine) -> None:
        """Send a message; no effect if the link is broken."""
        if self._broken is None:
            self._channel.send(message)

    async def answer(
        self, request: NewRequest, on_late: OnLate | None = None
    ) -> AsyncGenerator[AnswerDelta, None]:
        """Submit a request, and yield deltas until all its answers have ended.

        Closing the iterator early aborts the request; `on_late` then receives the last deltas of unfinished answers.
        """
        if self._broken is not None:
            raise EngineUnavailable(self._broken)
        inbox = self._inboxes[request.request_id] = _Inbox(OpenAnswers(request.params.n))
        self.send(wire.Submit(request))
        try:
            while inbox.open.left or not inbox.items.empty():
                item = await inbox.items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if not inbox.items.empty():
                    await asyncio.sleep(0)  # let the tasks of other streams run
        finally:
            del self._inboxes[request.request_id]
            if inbox.open.left and self._broken is None:
                self.send(wire.Abort(request.request_id))
                if on_late is not None:
                    self._aborted[request.request_id] = (inbox.open, on_late)

    async def stats(self, timeout: float) -> EngineStats | None:
        """Return the engine's statistics; None if no reply arrives within `timeout` seconds."""
        try:
            stats: EngineStats = await asyncio.wait_for(self._reply_to(wire.StatsWanted), timeout)
        except (TimeoutError, EngineUnavailable):
            return None
        return stats

    async def set_adapter(self, name: str, path: str | None) -> None:
        """Load a LoRA adapter, or unload it if `path` is None; raise `RequestError` on failure."""
        error = await self._reply_to(lambda number: wire.SetAdapter(number, name, path))
        if error is not None:
            raise RequestError(error)

    async def _reply_to(self, make_message: Callable[[int], wire.ToEngine]) -> Any:  # noqa: ANN401 - by message type
        """Send the message that `make_message` returns for a new message number; return the reply."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self.send(make_message(number))
        try:
            return await reply
        finally:
            del self._replies[number]

    async def listen(self) -> None:
        """Dispatch messages until the channel ends; raise `ChannelError` for damaged frames."""
        async for frame in self._channel.frames():
            self._dispatch(wire.decode_from_engine(frame))

    def abort_all(self) -> None:
        for request_id in self._inboxes:
            self.send(wire.Abort(request_id))

    def _dispatch(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Deltas(deltas):
                for delta in deltas:
                    self._deliver(delta.request_id, delta)
            case wire.Refused(request_id, error, param):
                self._deliver(request_id, RequestError(error, param))
            case wire.Stats(number, result) | wire.AdapterSet(number, result):
                if (reply := self._replies.get(number)) is not None and not reply.done():
                    reply.set_result(result)
            case wire.Starting(stage, done, total):
                self._on_stage(stage, done, total)
            case wire.Ready():
                if not self.ready.done():
                    self.ready.set_result(message)
            case wire.Fatal(error):
                self.fatal = error

    def _deliver(self, request_id: str, item: DeltaOrError) -> None:
        """Deliver an item to the request's reader; pass the final items of an aborted request to its `on_late`."""
        if (inbox := self._inboxes.get(request_id)) is not None:
            inbox.open.note(item)
            inbox.items.put_nowait(item)
        elif (aborted := self._aborted.get(request_id)) is not None:
            answers, on_late = aborted
            if answers.note(item):
                del self._aborted[request_id]
            if isinstance(item, Exception) or item.finish_reason is not None:
                on_late(item)

    def break_off(self, reason: str) -> None:
        """Close the connection, raise `EngineUnavailable` in all readers, and refuse new requests."""
        if self._broken is not None:
            return
        self._broken = reason
        self._channel.close()
        unfinished = [request_id for request_id, inbox in self._inboxes.items() if inbox.open.left]
        for request_id in [*unfinished, *self._aborted]:
            self._deliver(request_id, EngineUnavailable(reason))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineUnavailable(reason))
        if not self.ready.done():
            self.ready.cancel()
