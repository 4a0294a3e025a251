"""Run a decoder over token ids without an engine."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.backends.batch import ForwardBatch
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.engine.requests.answer import RequestLimits
from foreword.engine.requests.request import Request
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.paged_cache import PagedCache
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.speculation.draft import Draft
from foreword.speculation.requests import NOTHING_DRAWN, PassEntry
from foreword.speculation.transaction import Transaction

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")),
]


def torch_decoder(path: Path) -> TorchDecoder:
    """The reference."""
    checkpoint = open_checkpoint(path)
    return TorchDecoder(checkpoint.config, load_weights(checkpoint, torch.float32, torch.device("cpu")))


def make_request(cache: PagedCache, tokens: Sequence[int]) -> Request:
    limits = RequestLimits(100_000, frozenset())
    params = SamplingParams(temperature=0)
    sampler = RequestSampler(params, TokenLimits(1 << 20), tokens, seed=0)
    request = Request(0, tokens, params, sampler, limits)
    request.kv = cache.open()
    return request


def with_all_logits(batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, logit_rows=torch.arange(len(batch.token_ids), dtype=torch.int32))


def all_logits(decoder: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after every token of one text, in one pass on fresh memory: float32 [tokens, vocab]."""
    states = states_for(decoder, 1)
    cache = PagedCache(-(-len(tokens) // 16), states=states)
    runner = ModelRunner.allocate(decoder, cache.pool.num_pages, cache.page_size, states=states)
    with Transaction(cache, [PassEntry.of(make_request(cache, tokens), len(tokens))]) as transaction:
        return runner.forward(with_all_logits(transaction.batch([Draft()]))).logits.cpu()


def fragmented_cache(decoder: Decoder, num_pages: int, seed: int) -> tuple[ModelRunner, PagedCache]:
    """The decoder with fresh memory, and a cache for it whose free pages come in random order."""
    states = states_for(decoder, num_pages)
    cache = PagedCache(num_pages, states=states)
    churn = [cache.open() for _ in range(num_pages)]
    for sequence in churn:
        cache.reserve(sequence, 1)
    random.Random(seed).shuffle(churn)
    for sequence in churn:
        cache.close(sequence)
    return ModelRunner.allocate(decoder, num_pages, cache.page_size, states=states), cache


def states_for(decoder: Decoder, sequences: int, checkpoints: int = 4) -> StateSizes:
    """What recurrent layers need; nothing where there are none."""
    return NO_STATES if decoder.config.recurrent is None else StateSizes(sequences, checkpoints)


def compute(runner: ModelRunner, cache: PagedCache, request: Request, rows: int) -> None:
    """Compute the KV of the request's next committed tokens."""
    with Transaction(cache, [PassEntry.of(request, rows)]) as transaction:
        runner.forward(transaction.batch([Draft()]))
        transaction.commit([NOTHING_DRAWN])


def adapted_logits(decoder: Decoder, parts: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
    """Of every (slot, text), all in one pass."""
    pages = sum(-(-len(ids) // 16) for _, ids in parts) + 3
    runner, cache = fragmented_cache(decoder, pages, seed=1)
    requests = [make_request(cache, ids) for _, ids in parts]
    for request, (slot, _) in zip(requests, parts, strict=True):
        request.adapter_slot = slot
    entries = [PassEntry.of(request, len(ids)) for request, (_, ids) in zip(requests, parts, strict=True)]
    with Transaction(cache, entries) as transaction:
        transaction.reserve()
        batch = transaction.batch([Draft()] * len(entries))
        found = runner.forward(with_all_logits(batch)).logits
    return list(found.split([len(ids) for _, ids in parts]))
