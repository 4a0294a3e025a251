"""A pretend target that an engine can own, and the answers that it must give, by definition."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from foreword.acceptance.batch import Judgement
from foreword.acceptance.judge import judge
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.spec import RowSpec
from foreword.speculation.draft import Draft, stack
from helpers.history_target import HistoryTarget
from helpers.pretend_store import PRETEND_ROWS, PretendStore
from helpers.saboteur import Saboteur


class CheckedTarget(HistoryTarget):
    """Its logits depend on every token that a row sees; what an engine would take for one more fault is noted.

    It fails when the saboteur says so: before it has done anything, half-way, or when all is written.
    """

    def __init__(self, saboteur: Saboteur, vocab_size: int = 13, context_length: int = 96) -> None:
        super().__init__(vocab_size)
        self.config: Any = SimpleNamespace(
            num_layers=1, recurrent=None, vocab_size=vocab_size, context_length=context_length
        )
        self.saboteur = saboteur
        self.contradictions: list[str] = []
        self.most_rows = 0  # of any pass

    def kv_rows(self) -> RowSpec:
        return PRETEND_ROWS

    def state_spec(self) -> None:
        """It has no recurrent layers."""

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> PretendStore:
        assert page_size == self.page_size
        self.memory.clear()
        return PretendStore(num_pages, page_size, extra)

    def logits_after(self, history: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(bytes(history)))
        return 2.0 * torch.randn(self.vocab_size, generator=generator)

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        self.most_rows = max(self.most_rows, len(batch.token_ids))
        self.saboteur.strike("verify")
        if self.saboteur.is_due("torn verify"):
            self._write_half(batch)
            self.saboteur.strike("torn verify")
        try:
            output = super().forward(batch)
        except (AssertionError, LookupError) as error:
            self.contradictions.append(repr(error))
            raise
        self.saboteur.strike("late verify")
        return output

    def _write_half(self, batch: ForwardBatch) -> None:
        for source, target in batch.kv_copies.tolist()[::2]:
            self.memory[target] = self.memory[source]
        for slot in batch.slots.tolist()[::2]:
            self.memory[slot] = (0, 0)


@dataclass(frozen=True)
class PlainAnswer:
    """What must come out."""

    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...]  # of the tokens


@dataclass(frozen=True)
class Definition:
    """Answers straight from the target's logits, with no engine, step, cache or batch."""

    target: CheckedTarget
    end_ids: frozenset[int]
    context_length: int

    def answer(self, prompt: Sequence[int], params: SamplingParams, index: int) -> PlainAnswer:
        """The answer of this index."""
        assert params.seed is not None
        limits = TokenLimits(self.target.vocab_size, tuple(self.end_ids))
        sampler = RequestSampler(params, limits, prompt, params.seed, sample=index)
        stops = {*params.stop_token_ids} | (set() if params.ignore_eos else self.end_ids)
        tokens, logprobs = list(prompt), list[float]()
        for _ in range(min(params.max_tokens, self.context_length - len(prompt))):
            logits = self.target.logits_after(tokens).unsqueeze(0)
            token = int(judge(Judgement.of(logits, stack([Draft()]), [sampler])).target_tokens[0])
            sampler.commit([token])
            tokens.append(token)
            logprobs.append(float(logits[0].log_softmax(0)[token]))
            if token in stops:
                return PlainAnswer(tuple(tokens[len(prompt) :]), "stop", tuple(logprobs))
        return PlainAnswer(tuple(tokens[len(prompt) :]), "length", tuple(logprobs))

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Of every prompt token but the first."""
        rows = [self.target.logits_after(prompt[:count]).log_softmax(0) for count in range(1, len(prompt))]
        return [float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)]
