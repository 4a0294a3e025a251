"""Run a decoder over token ids without an engine."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.backends.batch import ForwardBatch
from foreword.backends.interface import Decoder
from foreword.engine.request import Request, RequestLimits
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.draft import Draft
from foreword.speculation.protocols import Scheduled
from foreword.speculation.transaction import Transaction
from foreword.speculation.verdict import NOTHING_DRAWN

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")),
]


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
    cache = PagedCache(-(-len(tokens) // 16))
    decoder.allocate_kv(cache.pool.num_pages, cache.page_size)
    with Transaction(cache, [Scheduled(make_request(cache, tokens), len(tokens))]) as transaction:
        return decoder.verify(with_all_logits(transaction.batch([Draft()]))).logits.cpu()


def fragmented_cache(decoder: Decoder, num_pages: int, seed: int) -> PagedCache:
    """A cache whose free pages come in random order, its memory full of garbage."""
    cache = PagedCache(num_pages)
    decoder.allocate_kv(num_pages, cache.page_size)
    churn = [cache.open() for _ in range(num_pages)]
    for sequence in churn:
        cache.reserve(sequence, 1)
    random.Random(seed).shuffle(churn)
    for sequence in churn:
        cache.close(sequence)
    return cache


def compute(decoder: Decoder, cache: PagedCache, request: Request, rows: int) -> None:
    """Compute the KV of the request's next committed tokens."""
    with Transaction(cache, [Scheduled(request, rows)]) as transaction:
        decoder.verify(transaction.batch([Draft()]))
        transaction.commit([NOTHING_DRAWN])
