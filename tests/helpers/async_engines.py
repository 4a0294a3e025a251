"""An asynchronous engine on a tiny decoder that a test can hold up or break."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.interface import KvStore
from foreword.backends.torch.decoder import TorchDecoder
from foreword.control.fixed import FixedPolicy
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.engine import Engine
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.outputs import RequestOutput
from foreword.engine.streams import AnswerStream
from foreword.engine.text import Vocabulary
from foreword.proofs.passes import tiny_decoder
from foreword.proofs.statistics import DrawingDrafter
from helpers.byte_pieces import PIECES, BytePieces
from helpers.waiting import PATIENCE

VOCAB = len(PIECES)
PROMPT = {"prompt_token_ids": [3, 4, 5]}


class GatedDecoder(TorchDecoder):
    """A tiny decoder that a test can hold up or break."""

    failure: BaseException | None = None
    passes = 0
    _limit: float = inf  # passes after which it waits
    _gate: threading.Condition

    @staticmethod
    def make() -> "GatedDecoder":
        sound = tiny_decoder(VOCAB, 3)
        decoder = GatedDecoder(sound.config, sound.weights)
        decoder._gate = threading.Condition()
        return decoder

    def allow(self, passes: float) -> None:
        """Let so many passes through from now on, and hold up the next one."""
        with self._gate:
            self._limit = self.passes + passes
            self._gate.notify_all()

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        with self._gate:
            assert self._gate.wait_for(lambda: self.passes < self._limit, timeout=PATIENCE)
            self.passes += 1
        if self.failure is not None:
            raise self.failure
        return super().forward(batch, store)


class Bench:
    """An engine on a decoder that can be held up."""

    def __init__(self) -> None:
        self.decoder = GatedDecoder.make()
        tokenizer = BytePieces()
        policy = FixedPolicy(DrawingDrafter(VOCAB, 4), 4)
        vocabulary = Vocabulary(VOCAB, frozenset({0}), tokenizer)  # type: ignore[arg-type]
        config = EngineConfig(kv_cache_memory_bytes=1 << 20)
        self.core = EngineCore(self.decoder, vocabulary, EngineParts(config, policy))
        self.engine = Engine(self.core, tokenizer)  # type: ignore[arg-type]

    @property
    def is_empty(self) -> bool:
        everyone_was_told = self.engine._listeners.idle.is_set()
        return everyone_was_told and not self.core.has_requests and self.core.cache.num_open == 0


def long(seed: int = 1, **more: Any) -> SamplingParams:
    return SamplingParams(**({"seed": seed, "max_tokens": 40, "ignore_eos": True} | more))


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), PATIENCE))


async def finished(bench: Bench, params: SamplingParams, **options: Any) -> RequestOutput:
    last = None
    async for output in bench.engine.generate(PROMPT, params, **options):
        last = output
    assert last is not None
    return last


def new(name: str, **more: Any) -> NewRequest:
    return NewRequest(name, (3, 4, 5), long(**more))


async def deltas_of(stream: AnswerStream) -> list[AnswerDelta]:
    return [delta async for delta in stream]
