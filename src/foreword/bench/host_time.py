"""Measures the CPU time of an engine's step, with passes that take no time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import process_time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.interface import Decoder, KvStore
from foreword.backends.memory import state_spec
from foreword.bench.batch_runs import greedy_requests
from foreword.bench.skeleton import staged
from foreword.control.policy import MeasuredPolicy
from foreword.drafters.config import SpeculationSetting
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.llm import LLM
from foreword.engine.text import Vocabulary
from foreword.errors import RequestError
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.spec import DECODER_ROWS, PageSpec, RowSpec, StateSpec
from foreword.progress import StageProgress
from foreword.speculation.protocols import Policy

CONTEXT = 128  # prompt length
GROUP = 10  # steps timed together
DRAFT_TOKENS = 4  # draft tokens per request and step
MODES: Mapping[str, SpeculationSetting] = {
    "plain": False,
    "ngram": {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "fixed": True},
    "suffix": {"method": "suffix", "num_speculative_tokens": DRAFT_TOKENS, "fixed": True},
    "ngram, as measured": {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS},
}
"""Decoding modes; the last one uses the default policy."""

_WORDS, _FIRST = 64, 300  # number of distinct tokens of the text, and the smallest of their ids
_DEVIATES = np.random.default_rng(0).random(997) < 0.15
"""Whether the text deviates from its usual continuation, by position modulo the array's length."""

VOCABULARY = _FIRST + _WORDS  # upper bound of token ids

_PASS_SECONDS, _ROW_SECONDS = 5e-3, 5e-6
"""Simulated times of a pass and of each of its rows. With these times speculation has a gain."""


@dataclass(frozen=True)
class HostTime:
    """CPU time of a step in one decoding mode at one batch size; median of several groups of steps."""

    way: str  # decoding mode, a key of `MODES`
    batch: int
    step_ms: float
    tokens: float  # per request and step

    @property
    def request_us(self) -> float:
        """CPU time of a step in microseconds, divided by the number of requests."""
        return 1e3 * self.step_ms / self.batch


def measure_host_time(
    llm: LLM, batches: Sequence[int], groups: int, on_progress: StageProgress
) -> list[HostTime]:
    """Measure every decoding mode at every batch size. Of the model, only the tokenizer is used."""
    if groups < 1 or not batches or min(batches) < 1:
        raise RequestError("--repeats and every batch must be at least 1")
    return [
        _host_time(llm, mode, setting, batch, groups)
        for batch in staged(batches, on_progress, "host time, batch {}".format)
        for mode, setting in MODES.items()
    ]


def _host_time(llm: LLM, mode: str, setting: SpeculationSetting, batch: int, groups: int) -> HostTime:
    most_tokens = ((groups + 1) * GROUP + 1) * (DRAFT_TOKENS + 1)
    target = FreePasses(llm.engine.target, CONTEXT + most_tokens + 1)
    vocabulary = Vocabulary(VOCABULARY, frozenset(), llm.tokenizer)
    parts = target.engine_parts(batch, DRAFT_TOKENS, MeasuredPolicy())
    parts = replace(parts, build_drafter=llm.build_drafter)
    engine = EngineCore(cast(Decoder, target), vocabulary, parts)
    add_texts(engine, batch, most_tokens, setting)
    for _ in range(GROUP + 1):  # prefill and one-time work
        engine.step()
    tokens, seconds = 0, []
    for _ in range(groups):
        began, target.spent = process_time(), 0.0
        for _ in range(GROUP):
            tokens += sum(len(delta.token_ids) for delta in engine.step())
        seconds.append((process_time() - began - target.spent) / GROUP)
    engine.close()
    return HostTime(mode, batch, 1e3 * median(seconds), tokens / (groups * GROUP * batch))


def add_texts(engine: EngineCore, batch: int, tokens: int, setting: SpeculationSetting = None) -> None:
    """Add `batch` requests whose texts the simulated passes continue by up to `tokens` tokens."""
    for request in greedy_requests("host", map(_prompt, range(batch)), tokens, setting):
        engine.add(request)


def _prompt(start: int) -> tuple[int, ...]:
    """Return a prompt of `CONTEXT` tokens that begins with the token number `start`, counted cyclically."""
    tokens = [_FIRST + start % _WORDS]
    while len(tokens) < CONTEXT:
        tokens.append(int(_next(tokens[-1], len(tokens) - 1)))
    return tuple(tokens)


def _next(token: Any, position: Any) -> Any:  # noqa: ANN401 - numbers or arrays of them
    """Return the text's next token: the usual one, unless the text deviates at this position."""
    return usual_next(token, _DEVIATES[position % len(_DEVIATES)])


def usual_next(token: Any, deviation: Any = 0) -> Any:  # noqa: ANN401 - numbers or arrays of them
    """Return the usual next token; with a `deviation` of 1 or True, the token after it.

    The map is a cycle through all `_WORDS` tokens, so that lookups find every token again.
    """
    return _FIRST + (5 * (token - _FIRST) + 1 + deviation) % _WORDS


class FreePasses:
    """A decoder that computes the next tokens without a model; the time of its passes does not count."""

    is_shape_invariant = True
    device = torch.device("cpu")

    def __init__(self, like: Decoder, context_length: int) -> None:
        self.config = replace(like.config, vocab_size=VOCABULARY, context_length=context_length)
        self.clock = 0.0  # simulated seconds
        self.spent = 0.0  # CPU seconds in passes
        self._logits = np.eye(VOCABULARY, dtype=np.float32)

    def engine_parts(self, batch: int, draft_tokens: int, policy: Policy, **more: Any) -> EngineParts:  # noqa: ANN401
        """Return parts of an engine that runs all requests in every step, with the simulated clock."""
        rows = batch * (CONTEXT + draft_tokens + 1)
        config = EngineConfig(max_num_seqs=batch, max_num_batched_tokens=rows, max_step_seconds=None, **more)
        return EngineParts(config, policy, clock=lambda: self.clock)

    def kv_rows(self) -> RowSpec:
        return RowSpec(DECODER_ROWS, num_layers=1, num_kv_heads=1, head_dim=1)

    def state_spec(self) -> StateSpec | None:
        return state_spec(self.config, item_bytes=4)

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> KvStore:
        """Return a KV store without memory."""
        spec = PageSpec.of(self.kv_rows(), extra)
        sizes = {"num_pages": num_pages, "page_size": page_size, "bytes_per_row": spec.bytes_per_row}
        return cast(KvStore, SimpleNamespace(spec=spec, **sizes))

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        began, arrays = process_time(), batch.arrays
        rows = arrays.logit_rows
        wanted = _next(arrays.token_ids[rows], arrays.positions[rows])
        logits = torch.from_numpy(self._logits[wanted])
        self.clock += _PASS_SECONDS + _ROW_SECONDS * len(arrays.token_ids)
        self.spent += process_time() - began
        return ForwardOutput(logits, {})
