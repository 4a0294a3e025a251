"""Both ends of the channel in one process: every message, and what happens when an end breaks."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.errors import EngineUnavailable, RequestError
from foreword.wire import frames as wire
from foreword.wire import process as engine_process
from foreword.wire.link import EngineLink
from helpers.fake_engine import expected_tokens
from helpers.waiting import until

FAKE = "helpers.fake_engine:load_fake"


def connected(
    test: Callable[[EngineLink, "asyncio.Task[int]"], Awaitable[None]], factory: str = FAKE, **config: object
) -> None:
    """Run a test with a link to an engine process that is a task."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        host = asyncio.create_task(engine_process.run(theirs, factory))
        stages: list[tuple[str, int, int]] = []
        channel = wire.Channel(*await asyncio.open_connection(sock=ours))
        link = EngineLink(channel, lambda *stage: stages.append(stage))
        listening = asyncio.create_task(link.listen())
        link.send(wire.Start("model", config=dict(config)))
        await asyncio.wait((link.ready, host), return_when=asyncio.FIRST_COMPLETED)
        assert stages == ([("loading", 1, 2)] if factory == FAKE else [])
        try:
            await test(link, host)
        finally:
            link.break_off("over")
            await asyncio.wait_for(asyncio.gather(host, listening, return_exceptions=True), 30)

    asyncio.run(asyncio.wait_for(run(), 60))


def request(name: str = "a", tokens: int = 5, n: int = 1) -> NewRequest:
    return NewRequest(name, (5, 6), SamplingParams(max_tokens=tokens, n=n, seed=1))


def test_answers_come_back():
    async def test(link: EngineLink, _: "asyncio.Task[int]") -> None:
        assert link.ready.result() == wire.Ready(512)
        got: dict[int, list[int]] = {0: [], 1: []}
        async for delta in link.answer(request(n=2)):
            got[delta.index] += delta.token_ids
        assert got == {i: expected_tokens(request(), i, 5) for i in (0, 1)}
        assert link.in_flight == 0

    connected(test)


def test_a_refusal_is_the_requests_own_fault():
    async def test(link: EngineLink, _: "asyncio.Task[int]") -> None:
        with pytest.raises(RequestError, match="vocabulary"):
            await anext(link.answer(NewRequest("a", (360,))))
        assert [d async for d in link.answer(request())]

    connected(test)


def test_prompt_logprobs_that_fit_into_no_frame_end_their_request_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 50_000)

    async def test(link: EngineLink, _: "asyncio.Task[int]") -> None:
        scored = SamplingParams(max_tokens=400, seed=1, prompt_logprobs=20)
        other = asyncio.create_task(anext(link.answer(request("other", tokens=1))))
        with pytest.raises(RequestError, match="299 positions are too many") as refused:
            await anext(link.answer(NewRequest("long", (5,) * 300, scored)))
        assert refused.value.param == "prompt_logprobs"
        assert (await other).token_ids == tuple(expected_tokens(request(), 0, 1))  # of the same pass
        while (stats := await link.stats(10)) is None or stats.running:
            await asyncio.sleep(0.01)

    connected(test, step_seconds=0.5)  # the whole answer would take longer than the test may


def test_adapters_are_loaded_and_unloaded_over_the_channel():
    async def test(link: EngineLink, _: "asyncio.Task[int]") -> None:
        await link.set_adapter("sql", "/adapters/sql")
        with pytest.raises(RequestError, match="/bad is no folder"):
            await link.set_adapter("other", "/bad")
        await link.set_adapter("sql", None)
        with pytest.raises(RequestError, match="sql"):
            await link.set_adapter("sql", None)
        assert [d async for d in link.answer(request())]

    connected(test)


def test_an_adapter_that_is_being_loaded_when_the_engine_dies_is_told_so():
    async def test(link: EngineLink, host: "asyncio.Task[int]") -> None:
        loading = asyncio.create_task(link.set_adapter("sql", "/adapters/sql"))
        await asyncio.sleep(0)
        link.break_off("over")
        with pytest.raises(EngineUnavailable, match="over"):
            await loading

    connected(test)


def test_leaving_early_aborts():
    async def test(link: EngineLink, _: "asyncio.Task[int]") -> None:
        async with aclosing(link.answer(request(tokens=400))) as deltas:
            await anext(deltas)
        while (stats := await link.stats(10)) is None or stats.running:
            await asyncio.sleep(0.01)
        assert link.in_flight == 0

    connected(test, step_seconds=0.5)  # the whole answer would take longer than the test may


def test_abort_all_ends_every_answer():
    async def test(link: EngineLink, _: "asyncio.Task[int]") -> None:
        deltas = link.answer(request(tokens=400))
        await anext(deltas)
        link.abort_all()
        assert [d.finish_reason async for d in deltas][-1] == "abort"

    connected(test, step_seconds=0.02)


def test_the_ends_of_abandoned_answers_are_heard():
    async def test(link: EngineLink, _: "asyncio.Task[int]") -> None:
        heard: list[AnswerDelta | Exception] = []
        async with aclosing(link.answer(request(tokens=400, n=2), heard.append)) as deltas:
            await anext(deltas)
        while len(heard) < 2:
            await asyncio.sleep(0.01)
        ends = [item for item in heard if isinstance(item, AnswerDelta)]
        assert [(end.index, end.finish_reason) for end in ends] == [(0, "abort"), (1, "abort")]
        assert all(end.stats is not None and end.stats.output_tokens >= 1 for end in ends)
        assert not link._aborted
        async for _delta in link.answer(request("whole"), heard.append):
            pass
        assert len(heard) == 2

    connected(test, step_seconds=0.02)


def test_who_waits_for_abandoned_answers_hears_that_the_engine_died():
    async def test(link: EngineLink, _: "asyncio.Task[int]") -> None:
        heard: list[AnswerDelta | Exception] = []
        async with aclosing(link.answer(request(tokens=400), heard.append)) as deltas:
            await anext(deltas)
        link.break_off("gone")
        assert [type(item) for item in heard] == [EngineUnavailable]
        assert not link._aborted

    connected(test, step_seconds=0.02)


def test_the_switch_and_the_figures():
    async def test(link: EngineLink, _: "asyncio.Task[int]") -> None:
        for on in (False, True):
            link.send(wire.Speculate(on))
            deltas = [delta async for delta in link.answer(request())]
            assert deltas[-1].stats is not None
            assert (deltas[-1].stats.drafts > 0) == on
        stats = await link.stats(10)
        assert stats is not None
        assert (stats.running, stats.kv_usage, stats.drafter_faults) == (0, 0.0, {"ngram": 1})

    connected(test)


def test_drain_ends_the_process_when_all_is_said():
    async def test(link: EngineLink, host: "asyncio.Task[int]") -> None:
        deltas = link.answer(request(tokens=20))
        await anext(deltas)
        link.send(wire.Drain(30))
        assert [d.finish_reason async for d in deltas][-1] == "length"
        assert await host == 0

    connected(test, step_seconds=0.01)


def test_a_dead_engine_is_told_to_all_who_wait():
    async def test(link: EngineLink, _: "asyncio.Task[int]") -> None:
        deltas = link.answer(request(tokens=400))
        await anext(deltas)
        link.break_off("it is gone")
        with pytest.raises(EngineUnavailable, match="gone"):
            async for _delta in deltas:
                pass
        with pytest.raises(EngineUnavailable):
            await anext(link.answer(request("b")))
        assert await link.stats(1) is None

    connected(test, step_seconds=0.02)


def test_an_engine_that_cannot_be_made_says_why():
    async def test(link: EngineLink, host: "asyncio.Task[int]") -> None:
        assert await host == 1
        await until(lambda: link.fatal is not None)
        assert link.fatal == "this model is broken; get another"

    connected(test, factory="helpers.fake_engine:load_broken")


def test_an_engine_that_dies_ends_its_process():
    async def dies(link: EngineLink, host: "asyncio.Task[int]") -> None:
        waiting = asyncio.ensure_future(anext(link.answer(request())))
        assert await host == 1
        await until(lambda: link.fatal is not None)
        assert link.fatal == "the fake engine has stopped"
        waiting.cancel()

    connected(dies, factory="helpers.fake_engine:load_dying")


def test_an_idle_engine_that_dies_ends_its_process_too():
    async def dies(link: EngineLink, host: "asyncio.Task[int]") -> None:
        assert await host == 1
        await until(lambda: link.fatal is not None)
        assert link.fatal == "rank 1 is gone"

    connected(dies, factory="helpers.fake_engine:load_lost")


@pytest.mark.parametrize("damage", [b"\xff\xff\xff\xff", b"\0\0\0\3abc", wire.encode(wire.Start("again"))])
def test_a_damaged_frame_ends_the_engine_process_with_a_line_in_the_log(damage, caplog):
    async def test(link: EngineLink, host: "asyncio.Task[int]") -> None:
        link._channel._writer.write(damage)
        assert await host == 1

    connected(test)
    assert "closing the channel" in caplog.text
