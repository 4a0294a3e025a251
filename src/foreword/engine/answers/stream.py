"""What an engine thread hands to a consumer on an event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from foreword.engine.answers.ends import OpenAnswers
from foreword.engine.messages import AnswerDelta


class AnswerStream:
    """The deltas of one request as they come: `async for delta in stream`.

    The engine never waits for the consumer: what is not taken yet piles up here, and an answer is finite. Leaving
    the stream before its end, also by cancellation, aborts the request; `aclose` does it by hand.
    """

    def __init__(self, request_id: str, answers: int, abort: "Callable[[AnswerStream], None]") -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._abort = abort
        self._open = OpenAnswers(answers)
        self._arrived: deque[AnswerDelta | Exception] = deque()
        self._more = asyncio.Event()
        self._take: Callable[[AnswerDelta | Exception], None] | None = None

    def forward_to(self, take: Callable[[AnswerDelta | Exception], None]) -> None:
        """Hand everything to a function, on the stream's loop, instead of keeping it: for who reads many streams."""
        self._take = take
        while self._arrived:
            self._hand_over(self._arrived.popleft())

    def deliver(self, item: AnswerDelta | Exception) -> None:
        """Take a delta, or what went wrong. To be called on the stream's own loop."""
        if self._take is not None:
            self._hand_over(item)
        else:
            self._arrived.append(item)
            self._more.set()

    def _hand_over(self, item: AnswerDelta | Exception) -> None:
        if self._take is not None and self._open.left:
            self._open.note(item)
            self._take(item)

    @property
    def has_more(self) -> bool:
        """Whether something waits to be taken."""
        return bool(self._arrived)

    async def __aiter__(self) -> AsyncIterator[AnswerDelta]:
        try:
            while self._open.left:
                if not self._arrived:
                    self._more.clear()
                    await self._more.wait()
                item = self._arrived.popleft()
                self._open.note(item)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Stop listening; aborts what has not ended. Safe to repeat."""
        if self._open.left:
            self._open.left = 0
            self._abort(self)


def post(loop: asyncio.AbstractEventLoop, items: list[tuple[AnswerStream, AnswerDelta | Exception]]) -> bool:
    """Run the deliveries on the loop; False if it is closed and nobody listens any more."""

    def deliver() -> None:
        for stream, item in items:
            stream.deliver(item)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        return False
    return True
