"""What the engine itself takes per step: its steps on a target whose passes take no time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import process_time
from typing import Any, cast

import numpy as np
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.interface import Decoder, KvStore
from foreword.control.measured import MeasuredPolicy
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.llm import LLM
from foreword.engine.messages import NewRequest
from foreword.engine.parts import EngineParts
from foreword.engine.text import Vocabulary
from foreword.errors import RequestError
from foreword.kv.spec import DECODER_ROWS, PageSpec, RowSpec

CONTEXT = 128
GUESSES = 4
GROUP = 10
"""Tokens of every prompt, guesses per request and step, and steps that are timed together."""

WAYS: Mapping[str, Mapping[str, Any] | bool] = {
    "plain": False,
    "ngram": {"method": "ngram", "num_speculative_tokens": GUESSES, "fixed": True},
    "suffix": {"method": "suffix", "num_speculative_tokens": GUESSES, "fixed": True},
    "ngram, as measured": {"method": "ngram", "num_speculative_tokens": GUESSES},
}
"""How requests are decoded; the last one leaves it to the default policy."""

_WORDS, _FIRST = 64, 300
"""Tokens of the text, and the first of them."""

_TURNS = np.random.default_rng(0).random(997) < 0.15
"""By position: where the text leaves its usual way."""

VOCABULARY = _FIRST + _WORDS
"""Ids of the tokens are below this."""

_PASS_SECONDS, _ROW_SECONDS = 5e-3, 5e-6  # of the clock that the engine sees: on it guesses pay


@dataclass(frozen=True)
class HostTime:
    """The processor's time for one step: median of several groups of steps."""

    way: str
    batch: int
    step_ms: float
    tokens: float  # per request and step

    @property
    def request_us(self) -> float:
        """For each request."""
        return 1e3 * self.step_ms / self.batch


def measure_host_time(
    llm: LLM, batches: Sequence[int], groups: int, on_progress: Callable[[str, int, int], None]
) -> list[HostTime]:
    """Every way of decoding with every batch. Only the tokenizer of the model is used."""
    if groups < 1 or not batches or min(batches) < 1:
        raise RequestError("--repeats and every batch must be at least 1")
    found = []
    for place, batch in enumerate(batches):
        for way, setting in WAYS.items():
            on_progress(f"host time, batch {batch}", place, len(batches))
            found.append(_measure(llm, way, setting, batch, groups))
    return found


def _measure(llm: LLM, way: str, setting: Mapping[str, Any] | bool, batch: int, groups: int) -> HostTime:
    steps = (groups + 1) * GROUP + 1
    target = FreePasses(llm.engine.target, CONTEXT + steps * (GUESSES + 1) + 1)
    config = EngineConfig(
        max_num_seqs=batch, max_num_batched_tokens=batch * (CONTEXT + GUESSES + 1), max_step_seconds=None
    )
    vocabulary = Vocabulary(VOCABULARY, frozenset(), llm.tokenizer)
    parts = EngineParts(config, MeasuredPolicy(), llm.build_drafter, clock=lambda: target.clock)
    engine = EngineCore(cast(Decoder, target), vocabulary, parts)
    params = SamplingParams(temperature=0, max_tokens=steps * (GUESSES + 1), ignore_eos=True)
    for index in range(batch):
        engine.add(NewRequest(f"host-{index}", prompt(index), params, speculation=setting))
    for _ in range(GROUP + 1):  # the prompts, and what is only done once
        engine.step()
    tokens, seconds = 0, []
    for _ in range(groups):
        began, target.spent = process_time(), 0.0
        for _ in range(GROUP):
            tokens += sum(len(delta.token_ids) for delta in engine.step())
        seconds.append((process_time() - began - target.spent) / GROUP)
    engine.close()
    return HostTime(way, batch, 1e3 * median(seconds), tokens / (groups * GROUP * batch))


def prompt(start: int) -> tuple[int, ...]:
    """A prompt that goes the usual way of the text."""
    tokens = [_FIRST + start % _WORDS]
    while len(tokens) < CONTEXT:
        tokens.append(int(_next(tokens[-1], len(tokens) - 1)))
    return tuple(tokens)


def _next(token: Any, position: Any) -> Any:  # noqa: ANN401 - numbers or arrays of them
    """The token that follows: guesses from what was are right until the text turns."""
    return usual_way(token, _TURNS[position % len(_TURNS)])


def usual_way(token: Any, turn: Any = 0) -> Any:  # noqa: ANN401 - the same
    """The token that follows where the text does not turn."""
    return _FIRST + (5 * (token - _FIRST) + 1 + turn) % _WORDS


@dataclass(frozen=True)
class _NoBytes:
    """The sizes of a KV store, and no memory."""

    spec: PageSpec
    num_pages: int
    page_size: int

    @property
    def bytes_per_row(self) -> int:
        return self.spec.bytes_per_row


class FreePasses:
    """A decoder that knows what comes next without a model. Its own time is kept apart."""

    is_shape_invariant = True
    device = torch.device("cpu")

    def __init__(self, like: Decoder, context_length: int) -> None:
        self.config = replace(like.config, vocab_size=VOCABULARY, context_length=context_length)
        self.clock = 0.0  # seconds, as the engine sees them: a pass takes as long as a real one might
        self.spent = 0.0  # seconds of the processor in passes
        self._logits = np.eye(VOCABULARY, dtype=np.float32)

    def kv_rows(self) -> RowSpec:
        return RowSpec(DECODER_ROWS, num_layers=1, num_kv_heads=1, head_dim=1)

    def new_kv_store(self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = ()) -> KvStore:
        return cast(KvStore, _NoBytes(PageSpec.of(self.kv_rows(), extra), num_pages, page_size))

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        began, arrays = process_time(), batch.arrays
        rows = arrays.logit_rows
        wanted = _next(arrays.token_ids[rows], arrays.positions[rows])
        logits = torch.from_numpy(self._logits[wanted])
        self.clock += _PASS_SECONDS + _ROW_SECONDS * len(arrays.token_ids)
        self.spent += process_time() - began
        return ForwardOutput(logits, {})
