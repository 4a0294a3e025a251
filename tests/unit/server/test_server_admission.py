"""Admission: a bounded number of answers, and a way out that waits for them."""

import asyncio

import pytest

from foreword.server.admission import Admission
from foreword.server.errors import ApiError
from foreword.server.settings import Limits


def test_places_are_counted_by_answer_and_given_back():
    admission = Admission(Limits(running=2, queued=1))
    with admission.admit(2):
        assert admission.in_flight == 2
        with pytest.raises(ApiError) as caught:
            admission.check(2)
        assert caught.value.status == 429
        assert caught.value.retry_after is not None
        assert caught.value.response().headers["retry-after"].isdecimal()
        with admission.admit(1):
            assert admission.in_flight == 3
    assert admission.in_flight == 0
    admission.check(3)


def test_a_failure_inside_gives_the_places_back():
    admission = Admission(Limits(running=1, queued=0))
    with pytest.raises(ValueError, match="inside"), admission.admit(1):
        raise ValueError("inside")
    admission.check(1)


def test_what_could_never_fit_is_not_told_to_come_back():
    with pytest.raises(ApiError) as caught:
        Admission(Limits(running=1, queued=1)).check(3)
    assert caught.value.status == 400


def test_a_closed_door_lets_those_inside_finish():
    async def run() -> None:
        admission = Admission(Limits())
        with admission.admit(1):
            admission.close()
            with pytest.raises(ApiError) as caught:
                admission.check(1)
            assert caught.value.status == 503
            assert not await admission.wait_idle(0.01)
        assert await admission.wait_idle(10)

    asyncio.run(run())
