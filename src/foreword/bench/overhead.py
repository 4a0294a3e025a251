"""Measures the time of a draft relative to target passes, and the host time of steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, cast

import numpy as np
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.interface import Decoder, KvStore
from foreword.bench.methods import Method, request_config
from foreword.bench.prompts import own_prompts
from foreword.bench.skeleton import take_turns
from foreword.control.fixed import FixedPolicy
from foreword.control.policy import MeasuredPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.llm import LLM
from foreword.engine.messages import NewRequest
from foreword.engine.text import Vocabulary
from foreword.errors import RequestError
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.spec import DECODER_ROWS, PageSpec, RowSpec
from foreword.progress import StageProgress
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftTask
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StageSeconds
from foreword.speculation.requests import DraftPlan, PassEntry

VERIFY_ROWS = (1, 6)
"""Rows of the reference passes: plain decoding, and verification of five draft tokens."""


@dataclass(frozen=True)
class Overhead:
    """Median cost of one draft at one context length."""

    drafter: str
    context: int
    first_ms: float  # first draft of a request, which reads the whole text
    draft_ms: float  # later drafts
    verify_ms: Mapping[int, float]  # target passes, by number of rows

    @property
    def shares(self) -> dict[int, float]:
        """Time of a draft relative to passes, by number of rows."""
        return {rows: self.draft_ms / ms for rows, ms in self.verify_ms.items()}


class ArbitraryDrafts(Drafter):
    """Drafts the requested number of arbitrary tokens, for passes of a known size."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [
            Draft.chain([0] * task.max_nodes, len(task.request.tokens), task.request.epoch) for task in tasks
        ]


class TurnPolicy(FixedPolicy):
    """Uses the drafter that its caller chooses for each step."""

    def __init__(self, turns: Mapping[str, tuple[Drafter, int]]) -> None:
        super().__init__()
        self._turns = turns  # name -> (drafter, draft tokens)
        self.turn: str | None = None  # drafter of the next step; None: plain decoding
        self.max_nodes = max(nodes for _, nodes in turns.values())

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        if self.turn is None:
            return [None] * len(entries)
        drafter, nodes = self._turns[self.turn]
        return [DraftPlan(self.turn, drafter, nodes, nodes)] * len(entries)

    def drafters(self) -> list[Drafter]:
        return [drafter for drafter, _ in self._turns.values()]


def measure_overhead(
    llm: LLM,
    methods: Sequence[Method],
    contexts: Sequence[int],
    repeats: int,
    on_progress: StageProgress,
) -> list[Overhead]:
    """Decode one answer per context length; its steps alternate between drafters and passes of known size."""
    if repeats < 1:
        raise RequestError(f"repeats must be at least 1, not {repeats}")
    reference_passes: dict[str, tuple[Drafter, int]] = {
        _rows(rows): (ArbitraryDrafts(), rows - 1) for rows in VERIFY_ROWS
    }
    with TemporaryDirectory(prefix="foreword-heads-") as folder:  # random heads
        configs = {
            method.label: SpeculationConfig.parse(request_config(method, llm, Path(folder)))
            for method in methods
        }
        turns = reference_passes | {
            label: (llm.build_drafter(config), config.num_speculative_tokens)
            for label, config in configs.items()
        }
    policy = TurnPolicy(turns)
    engine = EngineCore(llm.engine.target, llm.loaded.vocabulary(), EngineParts(policy=policy))
    tokens = (repeats + 1) * len(turns) * (policy.max_nodes + 1) + 1  # if every draft token is accepted
    if not contexts or min(contexts) < 1 or max(contexts) + tokens > engine.max_model_len:
        raise RequestError(f"contexts must be in 1 .. {engine.max_model_len - tokens} for this model")
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    text = _text(llm, max(contexts))
    found = []
    for context in contexts:
        (request,) = engine.add(NewRequest("overhead", tuple(text[:context]), params))
        policy.turn = None
        while not request.output_ids:
            on_progress(f"reading {context} tokens", request.kv.computed, context)
            engine.step()
        arms = {turn: partial(_step, engine, policy, turn) for turn in turns}
        show = partial(on_progress, f"drafting after {context} tokens")
        steps = take_turns(arms, repeats + 1, show, warm_up=0)
        engine.abort(request.name)
        found += [_overhead(label, context, steps) for label in configs]
    return found


def _step(engine: EngineCore, policy: TurnPolicy, turn: str, _: int) -> StageSeconds:
    """Run a step with this drafter; return its times."""
    policy.turn = turn
    before = engine.seconds
    engine.step()
    return engine.seconds - before


def _overhead(label: str, context: int, steps: Mapping[str, Sequence[StageSeconds]]) -> Overhead:
    first, *later = (1e3 * step.draft for step in steps[label])
    passes = {rows: [1e3 * step.verify for step in steps[_rows(rows)][1:]] for rows in VERIFY_ROWS}
    return Overhead(label, context, first, median(later), {rows: median(ms) for rows, ms in passes.items()})


def _rows(rows: int) -> str:
    return f"a pass over {rows}"


def _text(llm: LLM, length: int) -> list[int]:
    """Return the shipped prompts repeated with small shifts, so that lookups find most continuations, but not all."""
    tokens = [token for prompt in own_prompts() for token in llm.encode(prompt.text)]
    rounds = (tokens[start:] + tokens[:start] for start in cycle(range(0, len(tokens), 97)))
    return list(islice((token for one in rounds for token in one), length))


CONTEXT = 128
DRAFT_TOKENS = 4
GROUP = 10
"""Prompt length, draft tokens per request and step, and steps timed together."""

WAYS: Mapping[str, Mapping[str, Any] | bool] = {
    "plain": False,
    "ngram": {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "fixed": True},
    "suffix": {"method": "suffix", "num_speculative_tokens": DRAFT_TOKENS, "fixed": True},
    "ngram, as measured": {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS},
}
"""Decoding modes; the last one uses the default policy."""

_WORDS, _FIRST = 64, 300
"""Number of distinct tokens of the text, and the smallest id."""

_DEVIATES = np.random.default_rng(0).random(997) < 0.15
"""Per position, whether the text deviates from its usual continuation."""

VOCABULARY = _FIRST + _WORDS
"""Upper bound of token ids."""

_PASS_SECONDS, _ROW_SECONDS = 5e-3, 5e-6
"""Simulated times of a pass and of each of its rows, with which speculation gains."""


@dataclass(frozen=True)
class HostTime:
    """CPU time per step; median of several groups of steps."""

    way: str  # decoding mode
    batch: int
    step_ms: float
    tokens: float  # per request and step

    @property
    def request_us(self) -> float:
        """CPU time per request."""
        return 1e3 * self.step_ms / self.batch


def measure_host_time(
    llm: LLM, batches: Sequence[int], groups: int, on_progress: StageProgress
) -> list[HostTime]:
    """Measure every decoding mode at every batch size. Of the model, only the tokenizer is used."""
    if groups < 1 or not batches or min(batches) < 1:
        raise RequestError("--repeats and every batch must be at least 1")
    found = []
    for place, batch in enumerate(batches):
        for way, setting in WAYS.items():
            on_progress(f"host time, batch {batch}", place, len(batches))
            found.append(_host_time(llm, way, setting, batch, groups))
    return found


def _host_time(llm: LLM, way: str, setting: Mapping[str, Any] | bool, batch: int, groups: int) -> HostTime:
    steps = (groups + 1) * GROUP + 1
    target = FreePasses(llm.engine.target, CONTEXT + steps * (DRAFT_TOKENS + 1) + 1)
    config = EngineConfig(
        max_num_seqs=batch, max_num_batched_tokens=batch * (CONTEXT + DRAFT_TOKENS + 1), max_step_seconds=None
    )
    vocabulary = Vocabulary(VOCABULARY, frozenset(), llm.tokenizer)
    parts = EngineParts(config, MeasuredPolicy(), llm.build_drafter, clock=lambda: target.clock)
    engine = EngineCore(cast(Decoder, target), vocabulary, parts)
    params = SamplingParams(temperature=0, max_tokens=steps * (DRAFT_TOKENS + 1), ignore_eos=True)
    for index in range(batch):
        engine.add(NewRequest(f"host-{index}", prompt(index), params, speculation=setting))
    for _ in range(GROUP + 1):  # prefill and one-time work
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
    """Return a prompt of the text that the simulated passes continue."""
    tokens = [_FIRST + start % _WORDS]
    while len(tokens) < CONTEXT:
        tokens.append(int(_next(tokens[-1], len(tokens) - 1)))
    return tuple(tokens)


def _next(token: Any, position: Any) -> Any:  # noqa: ANN401 - numbers or arrays of them
    """Return the next token, which a lookup predicts unless the text deviates at this position."""
    return usual_next(token, _DEVIATES[position % len(_DEVIATES)])


def usual_next(token: Any, turn: Any = 0) -> Any:  # noqa: ANN401 - the same
    """Return the usual next token, or with `turn` 1 a deviation."""
    return _FIRST + (5 * (token - _FIRST) + 1 + turn) % _WORDS


@dataclass(frozen=True)
class _NoBytes:
    """A KV store without memory."""

    spec: PageSpec
    num_pages: int
    page_size: int

    @property
    def bytes_per_row(self) -> int:
        return self.spec.bytes_per_row


class FreePasses:
    """A decoder that computes the next tokens without a model; its own time does not count."""

    is_shape_invariant = True
    device = torch.device("cpu")

    def __init__(self, like: Decoder, context_length: int) -> None:
        self.config = replace(like.config, vocab_size=VOCABULARY, context_length=context_length)
        self.clock = 0.0  # simulated seconds
        self.spent = 0.0  # CPU seconds in passes
        self._logits = np.eye(VOCABULARY, dtype=np.float32)

    def kv_rows(self) -> RowSpec:
        return RowSpec(DECODER_ROWS, num_layers=1, num_kv_heads=1, head_dim=1)

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> KvStore:
        return cast(KvStore, _NoBytes(PageSpec.of(self.kv_rows(), extra), num_pages, page_size))

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        began, arrays = process_time(), batch.arrays
        rows = arrays.logit_rows
        wanted = _next(arrays.token_ids[rows], arrays.positions[rows])
        logits = torch.from_numpy(self._logits[wanted])
        self.clock += _PASS_SECONDS + _ROW_SECONDS * len(arrays.token_ids)
        self.spent += process_time() - began
        return ForwardOutput(logits, {})
