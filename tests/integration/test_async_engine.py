"""The asynchronous engine: streams, aborts, draining, and what happens when its thread dies."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator
from math import inf
from typing import Any

import pytest

from foreword.engine.engine import stop_engine
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.outputs import RequestOutput
from foreword.engine.streams import AnswerStream
from foreword.errors import EngineStopped, RequestError
from helpers.async_engines import PROMPT, VOCAB, Bench, deltas_of, finished, long, new, run
from helpers.byte_pieces import BytePieces
from helpers.waiting import until


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.decoder.allow(inf)
    made.engine.close()


def test_outputs_grow_until_they_are_finished(bench: Bench):
    async def main() -> list[RequestOutput]:
        return [output async for output in bench.engine.generate(PROMPT, long(), request_id="mine")]

    outputs = run(main)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in itertools.pairwise(outputs):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)
        assert len(later.outputs[0].token_ids) > len(earlier.outputs[0].token_ids)
    last = outputs[-1]
    assert (last.request_id, last.prompt_token_ids) == ("mine", [3, 4, 5])
    assert len(last.outputs[0].token_ids) == 40
    assert last.outputs[0].text == BytePieces().decode(last.outputs[0].token_ids)
    assert last.outputs[0].stats is not None
    assert bench.is_empty


def test_an_idle_engine_knows_its_switch(bench: Bench):
    for on in (False, True):
        bench.engine.speculate(on)
        assert bench.engine.stats().speculating == on


def test_streamed_deltas_are_the_answer(bench: Bench):
    async def main() -> list[AnswerDelta]:
        return await deltas_of(bench.engine.submit(new("a", logprobs=1)))

    deltas = run(main)
    again = run(lambda: finished(bench, long())).outputs[0]
    assert "".join(delta.text for delta in deltas) == again.text
    assert [token for delta in deltas for token in delta.token_ids] == again.token_ids
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]


def test_many_at_once_are_answered_as_each_alone(bench: Bench):
    async def together() -> list[RequestOutput]:
        return await asyncio.gather(*(finished(bench, long(seed, n=1 + seed % 3)) for seed in range(12)))

    everyone = run(together)
    for seed in range(12):
        alone = run(lambda seed=seed: finished(bench, long(seed, n=1 + seed % 3)))
        assert [a.text for a in alone.outputs] == [a.text for a in everyone[seed].outputs]


def test_loops_in_several_threads_share_an_engine(bench: Bench):
    texts: dict[int, str] = {}

    def consumer(seed: int) -> None:
        texts[seed] = run(lambda: finished(bench, long(seed))).outputs[0].text

    threads = [threading.Thread(target=consumer, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {seed: run(lambda s=seed: finished(bench, long(s))).outputs[0].text for seed in range(4)}


def test_an_abort_ends_all_answers_of_a_request_and_nobody_elses(bench: Bench):
    bench.decoder.allow(0)

    async def main() -> tuple[list[AnswerDelta], RequestOutput]:
        stream = bench.engine.submit(new("gone", n=3))
        other = asyncio.create_task(finished(bench, long(5)))
        await asyncio.sleep(0)
        bench.engine.abort("gone")
        bench.engine.abort("nobody has this id")
        bench.decoder.allow(inf)
        return await deltas_of(stream), await other

    deltas, other = run(main)
    assert sorted(d.index for d in deltas if d.finish_reason == "abort") == [0, 1, 2]
    assert all(d.stats is not None for d in deltas if d.finish_reason is not None)
    assert other.outputs[0].finish_reason == "length"
    assert bench.is_empty


def test_leaving_early_aborts(bench: Bench):
    async def leave_outputs() -> None:
        async for _ in bench.engine.generate(PROMPT, long(max_tokens=55)):
            break

    async def leave_deltas() -> None:
        async for _ in bench.engine.submit(new("a", max_tokens=55)):
            break

    async def leave_by_hand() -> None:
        stream = bench.engine.submit(new("b", max_tokens=55))
        await stream.aclose()
        await stream.aclose()

    async def main(leave: Callable[[], Coroutine[Any, Any, None]]) -> None:
        before = bench.decoder.passes
        bench.decoder.allow(2)
        await leave()
        for _ in range(10):  # the generators that were left are closed by the loop
            await asyncio.sleep(0)
        bench.decoder.allow(inf)
        await until(lambda: bench.is_empty)
        assert bench.decoder.passes - before <= 3, "it ran on after everybody had left"

    for leave in (leave_outputs, leave_deltas, leave_by_hand):
        run(lambda leave=leave: main(leave))


def test_a_cancelled_task_aborts_its_request(bench: Bench):
    bench.decoder.allow(0)

    async def main() -> None:
        task = asyncio.create_task(finished(bench, long()))
        await until(lambda: bool(bench.core.scheduler.running))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        bench.decoder.allow(inf)
        await until(lambda: bench.is_empty)

    run(main)


def test_a_consumer_that_never_reads_holds_up_nobody(bench: Bench):
    async def main() -> None:
        idle = bench.engine.submit(new("idle"))
        other = await finished(bench, long(2))
        assert other.outputs[0].finish_reason == "length"
        await until(lambda: bench.is_empty)
        late = await deltas_of(idle)
        assert sum(len(delta.token_ids) for delta in late) == 40
        assert late[-1].finish_reason == "length"

    run(main)


def test_a_slow_consumer_gets_fewer_outputs_with_the_same_text(bench: Bench):
    async def main() -> list[RequestOutput]:
        outputs = []
        async for output in bench.engine.generate(PROMPT, long()):
            outputs.append(output)
            await until(lambda: bench.is_empty)
        return outputs

    outputs = run(main)
    assert len(outputs) <= 3
    assert outputs[-1].outputs[0].text == run(lambda: finished(bench, long())).outputs[0].text


def test_a_loop_that_closes_without_a_word_leaves_nothing_behind(bench: Bench):
    bench.decoder.allow(0)
    loop = asyncio.new_event_loop()

    async def submit() -> AnswerStream:
        return bench.engine.submit(new("orphan", max_tokens=55))

    stream = loop.run_until_complete(submit())
    loop.close()
    bench.decoder.allow(inf)
    run(lambda: until(lambda: bench.is_empty))
    assert bench.decoder.passes <= 2, "it ran on though nobody can listen"
    assert not stream.has_more
    assert run(lambda: finished(bench, long())).outputs[0].finish_reason == "length"


def test_draining_waits_and_refuses_what_is_new(bench: Bench):
    bench.decoder.allow(0)

    async def main() -> None:
        stream = bench.engine.submit(new("last"))
        assert await bench.engine.drain(timeout=0.05) is False
        with pytest.raises(EngineStopped, match="draining"):
            bench.engine.submit(new("too late"))
        draining = asyncio.create_task(bench.engine.drain())
        await asyncio.sleep(0.01)
        assert not draining.done()
        bench.decoder.allow(inf)
        assert await draining is True
        assert (await deltas_of(stream))[-1].finish_reason == "length"
        assert bench.engine.is_alive

    run(main)


def test_an_idle_engine_drains_at_once(bench: Bench):
    assert run(lambda: bench.engine.drain(timeout=60)) is True


def test_closing_while_it_runs_ends_every_stream(bench: Bench):
    bench.decoder.allow(0)

    async def main() -> None:
        streams = [bench.engine.submit(new(f"r{i}", max_tokens=55)) for i in range(3)]
        await until(lambda: bool(bench.core.scheduler.running))  # it reads no mail before the pass has ended
        mail = bench.engine._mail
        unread = mail.qsize()
        closing = asyncio.create_task(asyncio.to_thread(bench.engine.close))
        await until(lambda: mail.qsize() > unread)
        bench.decoder.allow(inf)
        await closing
        for stream in streams:
            with pytest.raises(EngineStopped, match="closed"):
                await deltas_of(stream)
        with pytest.raises(EngineStopped, match="closed"):
            bench.engine.submit(new("too late"))
        assert not bench.engine.is_alive
        bench.engine.close()  # again

    run(main)


def test_an_id_is_taken_until_its_request_has_ended(bench: Bench):
    bench.decoder.allow(0)

    async def main() -> None:
        first = bench.engine.submit(new("same"))
        with pytest.raises(RequestError, match="'same'"):
            bench.engine.submit(new("same"))
        bench.decoder.allow(inf)
        await deltas_of(first)
        assert (await deltas_of(bench.engine.submit(new("same"))))[-1].finish_reason == "length"

    run(main)


def test_an_old_stream_does_not_abort_a_new_request_of_the_same_name(bench: Bench):
    async def main() -> None:
        old = bench.engine.submit(new("same"))
        await until(lambda: bench.is_empty)
        bench.decoder.allow(0)
        young = bench.engine.submit(new("same"))
        await old.aclose()  # its answer has ended, though nobody has read it
        bench.decoder.allow(inf)
        assert (await deltas_of(young))[-1].finish_reason == "length"

    run(main)


def test_what_cannot_be_answered_is_refused_at_once(bench: Bench):
    async def main() -> None:
        for bad in (NewRequest("a", ()), NewRequest("b", (VOCAB,)), NewRequest("c", (3,) * 64)):
            with pytest.raises(RequestError) as refused:
                bench.engine.submit(bad)
            assert refused.value.param == "prompt"
        with pytest.raises(RequestError) as refused:
            bench.engine.submit(NewRequest("d", (3,), prediction=(VOCAB,)))
        assert refused.value.param == "prediction"
        with pytest.raises(RequestError, match="method"):
            await finished(bench, long(), speculation={"method": "no such thing"})
        assert (await deltas_of(bench.engine.submit(new("a"))))[-1].finish_reason == "length"

    run(main)


@pytest.mark.parametrize("error", [RuntimeError("the shelf broke"), SystemExit()])
def test_when_the_thread_dies_every_stream_hears_of_it(bench: Bench, error: BaseException):
    bench.decoder.allow(0)

    def broken(_: object) -> list[AnswerDelta]:
        raise error

    async def main() -> None:
        streams = [bench.engine.submit(new(f"r{i}")) for i in range(3)]
        await until(lambda: bool(bench.core.scheduler.running))
        bench.core.settle = broken  # type: ignore[method-assign]
        bench.decoder.allow(inf)
        for stream in streams:
            with pytest.raises(EngineStopped, match=type(error).__name__):
                await deltas_of(stream)
        await until(lambda: not bench.engine.is_alive)
        with pytest.raises(EngineStopped, match="failed"):
            bench.engine.submit(new("too late"))
        assert await bench.engine.drain(timeout=5) is True

    run(main)


@pytest.mark.parametrize("is_idle", [False, True])
def test_when_whoever_runs_the_passes_is_gone_the_engine_ends_with_one_line(
    bench: Bench, is_idle: bool, caplog: pytest.LogCaptureFixture
):
    heard: list[Exception] = []
    bench.engine.when_dead(heard.append)

    async def main() -> None:
        if is_idle:
            bench.engine._mail.put(lambda: stop_engine("rank 1 is gone"))
        else:
            bench.decoder.failure = EngineStopped("rank 1 is gone")
            with pytest.raises(EngineStopped, match="the engine has failed: rank 1 is gone"):
                await finished(bench, long())
        await until(lambda: heard)
        with pytest.raises(EngineStopped, match="rank 1 is gone"):
            bench.engine.submit(new("too late"))

    run(main)
    bench.engine.when_dead(heard.append)  # who comes late hears of it, too
    assert [str(error) for error in heard] == ["the engine has failed: rank 1 is gone"] * 2
    assert [record.exc_info for record in caplog.records] == [None]


def test_a_failing_pass_costs_the_request_and_not_the_engine(bench: Bench):
    async def main() -> None:
        bench.decoder.failure = RuntimeError("out of luck")
        output = await finished(bench, long())
        assert output.outputs[0].finish_reason == "error"
        assert "out of luck" in (output.outputs[0].error or "")
        bench.decoder.failure = None
        assert (await finished(bench, long())).outputs[0].finish_reason == "length"
        await until(lambda: bench.engine.stats().step_faults.get("request") == 1)

    run(main)


def test_speculation_is_switched_off_and_on_without_a_change_of_text(bench: Bench):
    async def main() -> list[RequestOutput]:
        on = await finished(bench, long())
        bench.engine.speculate(False)
        off = await finished(bench, long())
        changing = asyncio.create_task(finished(bench, long()))
        while not changing.done():
            bench.engine.speculate(not bench.engine.stats().speculating)
            await asyncio.sleep(0.002)
        bench.engine.speculate(True)
        return [on, off, await changing, await finished(bench, long())]

    on, off, changing, again = (output.outputs[0] for output in run(main))
    assert on.token_ids == off.token_ids == changing.token_ids == again.token_ids
    assert on.stats is not None
    assert off.stats is not None
    assert on.stats.drafted == again.stats.drafted > 0
    assert off.stats.drafted == 0
    assert off.stats.passes == 40


def test_statistics_tell_how_things_stand(bench: Bench):
    bench.decoder.allow(0)

    async def main() -> None:
        stream = bench.engine.submit(new("a", n=2))
        await until(lambda: bench.core.scheduler.has_requests)
        bench.decoder.allow(inf)
        await deltas_of(stream)
        await until(lambda: bench.engine.stats().steps == bench.core.steps)  # those after the last step

    run(main)
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_pages_used) == (0, 0, 0)
    assert stats.kv_pages > 0
    assert stats.steps > 0
    assert stats.speculating
    assert stats.step_faults == {}
    assert 0 < stats.verify_seconds <= stats.step_seconds
    drafts, drafted, accepted = stats.acceptance["given/sampled"]
    assert 0 < accepted < drafted
    assert 0 < drafts <= stats.steps * 2
