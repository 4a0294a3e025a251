"""When an engine counts as hung, and when it is only idle or slow."""

import asyncio
from collections.abc import Iterator

import pytest

from foreword.engine.messages import EngineStats
from foreword.wire.link import HANG_CHECKS, wait_until_hung
from helpers.virtual_time import run_in_virtual_time


class Engine:
    """Answers what it is told to, and fails the test if it is asked beyond that."""

    def __init__(self, told: list[EngineStats | None], unfinished: int) -> None:
        self._told: Iterator[EngineStats | None] = iter(told)
        self.unfinished = unfinished
        self.asked = 0

    async def stats(self, timeout: float) -> EngineStats | None:
        self.asked += 1
        await asyncio.sleep(timeout)
        return next(self._told)


def looks_until_hung(told: list[EngineStats | None], unfinished: int = 1) -> int:
    engine = Engine(told, unfinished)
    run_in_virtual_time(wait_until_hung(engine, float(HANG_CHECKS)))
    return engine.asked


def test_silence_is_a_hang():
    assert looks_until_hung([None] * HANG_CHECKS) == HANG_CHECKS


def test_silence_counts_from_the_last_sign_of_life():
    told = [None, None, EngineStats(steps=1), None, EngineStats(steps=2), *[None] * HANG_CHECKS]
    assert looks_until_hung(told) == len(told)


def test_an_engine_with_work_that_does_not_step_hangs():
    told = [EngineStats(steps=7)] * (HANG_CHECKS + 1)
    assert looks_until_hung(told) == HANG_CHECKS + 1


def test_an_idle_engine_does_not_hang():
    with pytest.raises(RuntimeError, match="StopIteration"):  # it is asked for ever
        looks_until_hung([EngineStats(steps=7)] * 50, unfinished=0)
