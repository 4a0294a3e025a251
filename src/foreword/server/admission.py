"""Limits concurrent answers; the refusal of a request states when to try again (Retry-After)."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from foreword.server.errors import ApiError
from foreword.server.settings import Limits

_DECAY = 0.9  # weight of the previous mean service time per answered request
_LONGEST_WAIT = 60  # maximum Retry-After in seconds


class Admission:
    """Counts answers in flight, from the admission of a request to the last byte of its answers."""

    def __init__(self, limits: Limits) -> None:
        self._running = limits.running
        self._capacity = limits.running + limits.queued
        self._in_flight = 0
        self._mean_seconds = 1.0  # recent mean time from admission to the last byte
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def close(self) -> None:
        """Refuse all further requests."""
        self._closed = True

    def check(self, answers: int) -> None:
        """Raise 503 if the server is stopping, 429 if too many answers are in flight, 400 for too many `answers`."""
        if self._closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        if answers > self._capacity:
            raise ApiError(
                400, f"the request has {answers} answers; this server takes at most {self._capacity}"
            )
        if self._in_flight + answers > self._capacity:
            raise ApiError(
                429,
                f"the server is busy with {self._in_flight} answers; try again later",
                code="queue_full",
                retry_after=self.retry_after(),
            )

    @contextmanager
    def admit(self, answers: int) -> Iterator[None]:
        """Count the given number of answers as in flight until the block ends."""
        self.check(answers)
        self._in_flight += answers
        self._idle.clear()
        began = monotonic()
        try:
            yield
        finally:
            self._mean_seconds = _DECAY * self._mean_seconds + (1 - _DECAY) * (monotonic() - began)
            self._in_flight -= answers
            if not self._in_flight:
                self._idle.set()

    def retry_after(self) -> int:
        """Estimate the seconds until the next answer ends: the mean service time / concurrent answers."""
        interval = self._mean_seconds / max(self._running, 1)
        return max(1, min(_LONGEST_WAIT, math.ceil(interval)))

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is in flight; return False after the timeout."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True
