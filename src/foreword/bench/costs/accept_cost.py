"""What judging drafts costs, as a share of the target pass that they were verified by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement
from foreword.acceptance.judge import judge
from foreword.acceptance.logprobs import request_logprobs
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.proofs.lone_request import lone_request
from foreword.speculation.draft import Draft, stack
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction
from foreword.speculation.verdict import NOTHING_DRAWN


@dataclass(frozen=True)
class AcceptCost:
    """Cost of judging one batch."""

    requests: int  # each with one chain
    ms: float  # median
    ms_per_request: float
    ratio: float  # ms per request, to the target pass over one request's rows


@dataclass(frozen=True)
class AcceptCosts:
    """All batches, and the pass that they are compared with."""

    verify_ms: float  # median target pass over one request's newest token and chain
    rows: list[AcceptCost]


class _Verified:
    """A request with a chain after its committed text, ready to be verified again and again."""

    def __init__(self, target: Decoder, tokens: Sequence[int], chain: int, params: SamplingParams) -> None:
        context = len(tokens) - chain
        self.cache = PagedCache(-(-len(tokens) // PAGE_SIZE))
        self.runner = ModelRunner.allocate(target, self.cache.pool.num_pages, PAGE_SIZE)
        self.request = lone_request(self.cache, tokens[:context], target.config.vocab_size, params, seed=1)
        self.draft = Draft.chain(tokens[context:], context)
        with Transaction(self.cache, [PassEntry.of(self.request, context - 1)]) as transaction:
            self.runner.forward(transaction.batch([Draft()]))
            transaction.commit([NOTHING_DRAWN])

    def verify(self) -> tuple[float, Tensor]:
        """Seconds of one pass, and its logits [chain + 1, vocab]."""
        with Transaction(self.cache, [PassEntry.of(self.request, 1)]) as transaction:  # left without commit
            batch = transaction.batch([self.draft])
            began = perf_counter()
            logits = self.runner.forward(batch).logits
            logits[0, 0].item()  # waits for the device
            return perf_counter() - began, logits


def measure_accept_cost(
    target: Decoder,
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    chain: int = 5,
    rule: Rule = Rule.COUPLED,
    batches: Sequence[int] = (1, 4, 16),
    repeats: int = 15,
    progress: Callable[[int, int], None] | None = None,
) -> AcceptCosts:
    """Median milliseconds of judging batches of chains on a real text, every repeat beside a target pass."""
    if chain < 0 or len(tokens) < chain + 2 or repeats < 1 or not batches or min(batches) < 1:
        raise RequestError(
            "the text must be longer than the chain, which may be empty; repeats and batch sizes at least 1"
        )
    verified = _Verified(target, tokens, chain, params)
    passes: list[float] = []
    times: dict[int, list[float]] = {size: [] for size in batches}
    for repeat in range(repeats + 1):
        seconds, logits = verified.verify()
        taken = {size: _timed_judge(logits, verified, params, size, rule) for size in batches}
        if repeat > 0:  # the first round warms up
            passes.append(seconds)
            for size in batches:
                times[size].append(taken[size])
        if progress is not None:
            progress(repeat + 1, repeats + 1)
    verify_ms = 1e3 * median(passes)
    medians = {size: 1e3 * median(times[size]) for size in batches}
    rows = [AcceptCost(n, medians[n], medians[n] / n, medians[n] / n / verify_ms) for n in batches]
    return AcceptCosts(verify_ms, rows)


def _timed_judge(logits: Tensor, verified: _Verified, params: SamplingParams, size: int, rule: Rule) -> float:
    prompt = verified.request.tokens
    limits = TokenLimits(logits.shape[1])
    samplers = [RequestSampler(params, limits, prompt, seed, rule=rule) for seed in range(size)]
    together = torch.cat([logits] * size)
    began = perf_counter()
    judged = Judgement.of(together, stack([verified.draft] * size), samplers)
    found = judge(judged)
    for place in range(size):
        if found.error(place) is None:
            found.path(place), found.tokens(judged.trees, place), request_logprobs(judged, found, place)
    return perf_counter() - began
