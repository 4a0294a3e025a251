"""Who listens to which request, shared between an engine's thread and its callers."""

import threading
from asyncio import AbstractEventLoop
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.engine.answers.ends import OpenAnswers
from foreword.engine.answers.stream import AnswerStream, post
from foreword.engine.messages import AnswerDelta
from foreword.errors import RequestError


@dataclass
class Listener:
    """A request's stream and how many of its answers are still to end."""

    stream: AnswerStream
    open: OpenAnswers
    is_aborted: bool = False  # before it was queued


@dataclass
class Listeners:
    """Who listens to what, shared between the engine's thread and its callers."""

    by_request: dict[str, Listener] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: threading.Event = field(default_factory=threading.Event)
    closed: bool = False  # nobody may come any more: the engine drains, or has told everyone of its end

    def add(self, stream: AnswerStream, answers: int) -> bool:
        """Listen; False if it is too late for that."""
        with self.lock:
            if self.closed:
                return False
            if stream.request_id in self.by_request:
                raise RequestError(
                    f"a request with the id {stream.request_id!r} is being answered; choose another id"
                )
            self.by_request[stream.request_id] = Listener(stream, OpenAnswers(answers))
            self.idle.clear()
            return True

    def stream_of(self, request_id: str) -> AnswerStream | None:
        """Return the stream that waits for the answers of this id."""
        with self.lock:
            listener = self.by_request.get(request_id)
            return None if listener is None else listener.stream

    def abort_later(self, stream: AnswerStream) -> None:
        """Mark a request that is not queued yet: it ends as soon as it is. A stream that has ended is ignored."""
        with self.lock:
            listener = self.by_request.get(stream.request_id)
            if listener is not None and listener.stream is stream:
                listener.is_aborted = True

    def is_aborted(self, stream: AnswerStream) -> bool:
        """Whether the request of this stream, and not an earlier one of the same id, is to end once it is queued."""
        with self.lock:
            listener = self.by_request.get(stream.request_id)
            return listener is not None and listener.stream is stream and listener.is_aborted

    def knows(self, stream: AnswerStream) -> bool:
        """Whether this stream, and not a later one of the same name, still waits for an end."""
        with self.lock:
            listener = self.by_request.get(stream.request_id)
            return listener is not None and listener.stream is stream

    def forget(self, stream: AnswerStream) -> bool:
        """Stop listening; False if it was forgotten before."""
        with self.lock:
            listener = self.by_request.get(stream.request_id)
            if listener is None or listener.stream is not stream:
                return False
            self._forget(stream.request_id)
            return True

    def note(self, delta: AnswerDelta) -> AnswerStream | None:
        """Who listens to this delta; forgotten with the end of the last answer."""
        with self.lock:
            listener = self.by_request.get(delta.request_id)
            if listener is None:
                return None
            if listener.open.note(delta):
                self._forget(delta.request_id)
            return listener.stream

    def deliver(self, deltas: Sequence[AnswerDelta]) -> list[AnswerStream]:
        """Hand each event loop all that is new for its streams, in one go; the streams whose loop is gone."""
        by_loop: dict[AbstractEventLoop, list[tuple[AnswerStream, AnswerDelta | Exception]]] = {}
        for delta in deltas:
            stream = self.note(delta)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, delta))
        lost = [items for loop, items in by_loop.items() if not post(loop, items)]
        return [stream for items in lost for stream, _ in items]

    def close(self) -> None:
        with self.lock:
            self.closed = True

    def take_all(self) -> list[AnswerStream]:
        """Close and forget everyone; returns who has to be told."""
        with self.lock:
            self.closed = True
            streams = [listener.stream for listener in self.by_request.values()]
            self.by_request.clear()
            self.idle.set()
            return streams

    def _forget(self, request_id: str) -> None:
        del self.by_request[request_id]
        if not self.by_request:
            self.idle.set()
