"""Requests whose drafter has to be made first: nobody else waits for it."""

import asyncio
import threading
from collections.abc import Iterator
from math import inf

import pytest

from foreword.cancellation import check_cancelled
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.drafting.drafter_pool import MAX_DRAFTERS
from foreword.engine.engine import Engine
from foreword.engine.messages import NewRequest
from foreword.engine.text import Vocabulary
from foreword.errors import EngineStopped, RequestError
from foreword.proofs.statistics import DrawingDrafter
from foreword.speculation.drafting import Drafter
from helpers.async_engines import VOCAB, GatedDecoder, deltas_of, long, run
from helpers.waiting import until

WANTED = {"method": "ngram", "num_speculative_tokens": 3}


class Closable(DrawingDrafter):
    """A drafter that knows whether it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Workbench:
    """An engine whose drafters are made when the test says so."""

    def __init__(self) -> None:
        self.may_build = threading.Event()
        self.is_building = threading.Event()
        self.failure: Exception | None = None
        self.built = 0
        config = EngineConfig(kv_cache_memory_bytes=1 << 20)
        parts = EngineParts(config, build_drafter=self._build)
        self.decoder = GatedDecoder.make()
        self.core = EngineCore(self.decoder, Vocabulary(VOCAB), parts)
        self.engine = Engine(self.core)

    def _build(self, config: SpeculationConfig) -> Drafter:
        """As a model is loaded: tensor by tensor, until it is done or cancelled."""
        self.is_building.set()
        while not self.may_build.wait(0.001):
            check_cancelled()
        if self.failure is not None:
            raise self.failure
        self.built += 1
        return Closable(VOCAB, 4)


@pytest.fixture
def bench() -> Iterator[Workbench]:
    made = Workbench()
    yield made
    made.may_build.set()
    made.engine.close()


def speculating(name: str) -> NewRequest:
    return NewRequest(name, (3, 4, 5), long(), speculation=WANTED)


def tokens(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_others_are_answered_while_a_drafter_is_being_made(bench: Workbench):
    async def main() -> None:
        waiting = bench.engine.submit(speculating("waiting"))  # returns at once
        plain = await deltas_of(bench.engine.submit(NewRequest("plain", (3, 4, 5), long())))
        assert bench.built == 0
        bench.may_build.set()
        assert tokens(await deltas_of(waiting)) == tokens(plain)
        assert bench.built == 1
        assert tokens(await deltas_of(bench.engine.submit(speculating("again")))) == tokens(plain)
        assert bench.built == 1

    run(main)


def test_what_is_wrong_with_a_drafter_is_heard_on_the_stream(bench: Workbench):
    async def main() -> None:
        bench.failure = RequestError("no such model")
        bench.may_build.set()
        with pytest.raises(RequestError, match="no such model"):
            await deltas_of(bench.engine.submit(speculating("refused")))
        bench.failure = None
        assert tokens(await deltas_of(bench.engine.submit(speculating("refused"))))  # the name is free again

    run(main)


def test_a_request_that_is_left_while_its_drafter_is_made_never_runs(bench: Workbench):
    async def main() -> None:
        stream = bench.engine.submit(speculating("left"))
        await stream.aclose()
        bench.may_build.set()
        while not bench.built or not bench.engine._listeners.idle.is_set():
            await asyncio.sleep(0.01)
        await deltas_of(bench.engine.submit(NewRequest("plain", (3, 4, 5), long())))
        assert bench.core.steps <= 41  # of the second request alone
        assert await bench.engine.drain(timeout=60)

    run(main)


def test_an_engine_that_is_closed_meanwhile_cancels_the_making_and_ends_the_stream(bench: Workbench):
    async def main() -> None:
        stream = bench.engine.submit(speculating("orphan"))
        await asyncio.to_thread(bench.is_building.wait)
        await asyncio.to_thread(bench.engine.close)
        assert "foreword-prepare" not in [thread.name for thread in threading.enumerate()]
        assert bench.built == 0
        with pytest.raises(EngineStopped, match="closed"):
            await deltas_of(stream)

    run(main)


def test_an_abort_counts_though_the_drafter_is_still_being_made(bench: Workbench):
    async def main() -> None:
        stream = bench.engine.submit(speculating("aborted"))
        bench.engine.abort("aborted")
        await deltas_of(
            bench.engine.submit(NewRequest("plain", (3, 4, 5), long()))
        )  # the abort has been read
        bench.may_build.set()
        deltas = await deltas_of(stream)
        assert deltas[-1].finish_reason == "abort"
        assert tokens(deltas) == []

    run(main)


def test_an_abort_of_a_request_that_was_left_does_not_end_a_later_one_of_the_same_id(bench: Workbench):
    async def main() -> None:
        left = bench.engine.submit(speculating("again"))
        bench.engine.abort("again")
        await left.aclose()
        await until(bench.engine._listeners.idle.is_set)
        bench.decoder.allow(0)  # the later request cannot end before the first one is prepared
        later = bench.engine.submit(NewRequest("again", (3, 4, 5), long()))
        bench.may_build.set()
        await until(lambda: "foreword-prepare" not in [thread.name for thread in threading.enumerate()])
        bench.decoder.allow(inf)
        assert (await deltas_of(later))[-1].finish_reason == "length"

    run(main)


def test_an_abort_of_an_ended_request_does_not_end_a_later_one_of_the_same_id(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
):
    """The request ends, and its id is used again, between the lookup of its stream and the abort's turn."""

    async def main() -> None:
        ended = bench.engine.submit(NewRequest("again", (3, 4, 5), long()))
        await deltas_of(ended)
        bench.decoder.allow(0)
        later = bench.engine.submit(NewRequest("again", (3, 4, 5), long()))
        await until(lambda: bool(bench.core.scheduler.running))
        with monkeypatch.context() as patch:
            patch.setattr(bench.engine._listeners, "stream_of", lambda _request_id: ended)
            bench.engine.abort("again")
        bench.decoder.allow(inf)
        assert (await deltas_of(later))[-1].finish_reason == "length"

    run(main)


def test_a_request_whose_thread_cannot_be_started_leaves_its_id_free(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="thread"):
                bench.engine.submit(speculating("refused"))
        bench.may_build.set()
        assert tokens(await deltas_of(bench.engine.submit(speculating("refused"))))
        assert await bench.engine.drain(timeout=60)

    run(main)


def test_a_prepared_request_keeps_its_drafter_until_it_is_queued_or_discarded(bench: Workbench):
    bench.may_build.set()
    core = bench.core
    queued, dropped = core.prepare(speculating("queued")), core.prepare(speculating("dropped"))
    drafter = queued[0].speculation.drafter
    for most in range(MAX_DRAFTERS):  # others, until it is no longer kept for later requests
        wanted = {"method": "ngram", "prompt_lookup_max": 5 + most}
        core.discard(core.prepare(NewRequest("other", (3, 4, 5), long(), speculation=wanted)))
    assert not core.is_prepared_for(speculating("again"))
    core.discard(dropped)
    assert not drafter.is_closed
    core.discard(queued)
    assert drafter.is_closed


def test_a_drafter_whose_making_exits_ends_the_stream_and_nobody_else(bench: Workbench):
    async def main() -> None:
        bench.failure = SystemExit(3)  # type: ignore[assignment]
        bench.may_build.set()
        with pytest.raises(RequestError, match="SystemExit"):
            await deltas_of(bench.engine.submit(speculating("refused")))
        assert await bench.engine.drain(timeout=60)

    run(main)
