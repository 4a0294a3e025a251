"""A training on the engine's device runs in idle time, and for its share of busy time."""

import pytest

from foreword.learn.pausing import Pauses
from helpers.clocks import ScriptedClock
from helpers.learn_world import FakeProcess

SHARE, SLICE = 0.05, 0.1


@pytest.fixture
def clock() -> ScriptedClock:
    return ScriptedClock()


@pytest.fixture
def process(tmp_path_factory: pytest.TempPathFactory) -> FakeProcess:
    return FakeProcess((), tmp_path_factory.getbasetemp())


def _pauses(process: FakeProcess, clock: ScriptedClock, share: float = SHARE, shared: bool = True) -> Pauses:
    return Pauses(process, clock, share, 0.2, SLICE, shared)


def test_requests_pause_it_at_once(process: FakeProcess, clock: ScriptedClock):
    pauses = _pauses(process, clock)
    clock.pass_by(3)
    pauses.idle()
    pauses.busy()
    assert process.calls == ["pause"] and pauses.is_paused
    assert pauses.run_seconds == 3 and pauses.busy_seconds == 0


def test_it_resumes_when_the_engine_was_idle_for_some_time(process: FakeProcess, clock: ScriptedClock):
    pauses = _pauses(process, clock, share=0.0)
    pauses.busy()
    clock.pass_by(1)
    pauses.idle()
    clock.pass_by(0.19)
    pauses.idle()
    assert process.calls == ["pause"]
    clock.pass_by(0.02)
    pauses.idle()
    assert process.calls == ["pause", "resume"]
    pauses.busy()  # the credit of idle time is no credit for busy time
    assert process.calls == ["pause", "resume", "pause"]


def test_a_short_gap_between_requests_starts_the_wait_again(process: FakeProcess, clock: ScriptedClock):
    pauses = _pauses(process, clock, share=0.0)
    for _ in range(10):
        pauses.busy()
        clock.pass_by(0.05)
        pauses.idle()
        clock.pass_by(0.15)
    assert process.calls == ["pause"]


def test_it_gets_its_share_of_busy_time(process: FakeProcess, clock: ScriptedClock):
    pauses = _pauses(process, clock)
    for _ in range(100_000):  # 1000 s in steps of 10 ms
        pauses.busy()
        clock.pass_by(0.01)
    assert pauses.busy_seconds == pytest.approx(SHARE * 1000, rel=0.15)
    assert pauses.run_seconds == pauses.busy_seconds
    turns = process.calls.count("resume")
    assert pauses.busy_seconds / turns == pytest.approx(SLICE, rel=0.2)  # never long turns


def test_without_a_share_it_never_runs_beside_requests(process: FakeProcess, clock: ScriptedClock):
    pauses = _pauses(process, clock, share=0.0)
    for _ in range(1000):
        pauses.busy()
        clock.pass_by(0.1)
    assert process.calls == ["pause"] and pauses.busy_seconds == 0


def test_on_another_device_it_is_never_paused(process: FakeProcess, clock: ScriptedClock):
    pauses = _pauses(process, clock, shared=False)
    for _ in range(10):
        pauses.busy()
        clock.pass_by(1)
    pauses.idle()
    assert not process.calls and pauses.run_seconds == pauses.busy_seconds == 10
