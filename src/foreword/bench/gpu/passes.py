"""Device time of passes of a decoder: by rows of one request, by batch, and of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.bench.costs.step_cost import random_tokens
from foreword.bench.gpu.ceilings import timing_event
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.proofs.lone_request import lone_request
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction
from foreword.speculation.verdict import NOTHING_DRAWN

PASSES = 20
"""Passes that are handed over one after the other before the device is waited for."""


@dataclass(frozen=True)
class PassTime:
    """A pass over `requests` texts with `rows` new rows each."""

    requests: int
    rows: int
    device_ms: float  # of a pass, with many under way
    host_ms: float  # of handing one over


class PassTimer:
    """A decoder with texts of one length in its memory."""

    def __init__(self, decoder: Decoder, context: int, requests: int, most_rows: int) -> None:
        pages = requests * (-(-(context + most_rows) // PAGE_SIZE) + 1)
        self._cache = PagedCache(pages)
        self._runner = ModelRunner.allocate(decoder, pages, PAGE_SIZE)
        self._requests = []
        vocab_size = decoder.config.vocab_size
        for _ in range(requests):
            request = lone_request(self._cache, random_tokens(context, vocab_size), vocab_size)
            with Transaction(self._cache, [PassEntry.of(request, context - 1)]) as transaction:
                self._runner.forward(transaction.batch([Draft()]))
                transaction.commit([NOTHING_DRAWN])
            self._requests.append(request)

    def time(self, requests: int, rows: int, repeats: int = 5) -> PassTime:
        """A pass over the newest token of each and a chain after it, with all logits."""
        chosen = self._requests[:requests]
        drafts = [Draft.chain(request.tokens[: rows - 1], len(request.tokens)) for request in chosen]
        device, host = [], []
        with Transaction(self._cache, [PassEntry.of(request, 1) for request in chosen]) as transaction:
            batch = transaction.batch(drafts)
            for _ in range(3):
                self._runner.forward(batch)
            for _ in range(repeats):
                torch.cuda.synchronize()
                begin, end = (timing_event() for _ in range(2))
                began = perf_counter()
                begin.record()
                for _ in range(PASSES):
                    self._runner.forward(batch)
                end.record()
                host.append((perf_counter() - began) / PASSES)
                end.synchronize()
                device.append(begin.elapsed_time(end) / PASSES)
        return PassTime(requests, rows, median(device), median(host) * 1e3)


def prompt_seconds(decoder: Decoder, tokens: int, repeats: int = 5) -> float:
    """Of a prompt in one pass, with the last token's logits."""
    cache = PagedCache(-(-tokens // PAGE_SIZE) + 1)
    runner = ModelRunner.allocate(decoder, cache.pool.num_pages, PAGE_SIZE)
    vocab_size = decoder.config.vocab_size
    request = lone_request(cache, random_tokens(tokens, vocab_size), vocab_size)
    times = []
    with Transaction(cache, [PassEntry.of(request, tokens)]) as transaction:
        batch = transaction.batch([Draft()])
        for _ in range(repeats + 2):
            torch.cuda.synchronize()
            began = perf_counter()
            runner.forward(batch)
            torch.cuda.synchronize()
            times.append(perf_counter() - began)
    return median(times[2:])


def matrix_operations(decoder: Decoder, rows: int) -> float:
    """Of the layers' matrix products over this many rows."""
    return 2.0 * rows * decoder.layer_bytes / 2


def step_times(timer: PassTimer, batches: Sequence[int], rows: Sequence[int]) -> list[PassTime]:
    """Plain passes by batch, then passes of one request by rows."""
    return [*(timer.time(batch, 1) for batch in batches), *(timer.time(1, count) for count in rows)]
