"""What one target pass over n new tokens costs. Everything about speculation depends on this curve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.models.batch import MAX_DRAFT_NODES
from foreword.models.interface import Decoder
from foreword.speculation.draft import Draft
from foreword.speculation.protocols import Scheduled
from foreword.speculation.transaction import NOTHING_DRAWN, Transaction


@dataclass(frozen=True)
class StepCost:
    """Cost of a pass over `n` new tokens."""

    n: int
    ms: float  # median
    ratio: float  # to the first n measured


class _Context:
    """A request whose committed tokens all have KV but the newest."""

    def __init__(self, cache: PagedCache, length: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens: list[int] = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        self.kv = cache.open()
        self.epoch = 0
        self.room = MAX_DRAFT_NODES + 1

    def extend(self, tokens: Sequence[int], _logprobs: Sequence[object] = ()) -> None:
        self.tokens += tokens


def measure_step_cost(
    target: Decoder,
    new_tokens: Sequence[int],
    *,
    context: int = 256,
    repeats: int = 15,
    progress: Callable[[int, int], None] | None = None,
) -> list[StepCost]:
    """Median milliseconds of a pass over each number of new tokens (the newest committed one and a chain).

    The sizes are measured in turn within every repeat, so that a slow spell hits all of them alike.
    """
    _check(new_tokens, context, repeats, target.config.context_length)
    most_rows = context + max(new_tokens)
    cache = PagedCache(-(-most_rows // PAGE_SIZE))
    target.allocate_kv(cache.pool.num_pages, PAGE_SIZE)
    request = _Context(cache, context, target.config.vocab_size)
    _prefill(target, cache, request)
    times: dict[int, list[float]] = {n: [] for n in new_tokens}
    for repeat in range(repeats + 1):
        for n in new_tokens:
            seconds = _timed_pass(target, cache, request, n)
            if repeat > 0:  # the first round warms up
                times[n].append(seconds)
        if progress is not None:
            progress(repeat + 1, repeats + 1)
    medians = {n: 1e3 * median(times[n]) for n in new_tokens}
    return [StepCost(n, medians[n], medians[n] / medians[new_tokens[0]]) for n in new_tokens]


def _check(new_tokens: Sequence[int], context: int, repeats: int, context_length: int) -> None:
    if not new_tokens or any(not 1 <= n <= MAX_DRAFT_NODES + 1 for n in new_tokens):
        raise RequestError(f"the numbers of new tokens must be in 1 .. {MAX_DRAFT_NODES + 1}")
    if repeats < 1:
        raise RequestError(f"repeats must be at least 1, not {repeats}")
    if not context >= 1 or context + max(new_tokens) > context_length:
        raise RequestError(
            f"context + new tokens must be in 2 .. {context_length}, the model's context length"
        )


def _prefill(target: Decoder, cache: PagedCache, request: _Context) -> None:
    if len(request.tokens) > 1:
        share = Scheduled(request, len(request.tokens) - 1)  # type: ignore[arg-type]
        with Transaction(cache, [share]) as transaction:
            target.verify(transaction.batch([Draft()]))
            transaction.commit([NOTHING_DRAWN])


def _timed_pass(target: Decoder, cache: PagedCache, request: _Context, n: int) -> float:
    draft = Draft.chain(request.tokens[: n - 1], len(request.tokens))
    share = Scheduled(request, 1)  # type: ignore[arg-type]
    with Transaction(cache, [share]) as transaction:  # left without commit: every pass starts alike
        batch = transaction.batch([draft])
        began = perf_counter()
        target.verify(batch).logits.cpu()  # waits for the device
        return perf_counter() - began
