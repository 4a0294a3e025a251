"""Measures parts of a pass: the acceptance rule, and LoRA adapters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement
from foreword.acceptance.judge import judge
from foreword.acceptance.logprobs import request_logprobs
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.backends.batch import ForwardBatch
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.bench.step_cost import random_tokens
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.models.adapters import MAX_RANK, MODULES, Factors, Lora, layer_modules
from foreword.models.config import ModelConfig
from foreword.proofs.passes import lone_request
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


CONTEXT = 64
"""Committed tokens of every request."""

CHOICES = {"q, v": (0, 2), "q, k, v, o": (0, 1, 2, 3), "all seven": tuple(range(len(MODULES)))}
"""Modules that adapters are trained for, by their place in `MODULES`."""


@dataclass(frozen=True)
class AdapterCost:
    """A pass in which every request has an adapter."""

    adapters: int  # different ones; 0: none at all
    modules: str
    ms: float  # median
    ratio: float  # to the pass without, median of the rounds' ratios


def measure_adapters(
    decoder: Decoder, batch: int, rank: int, repeats: int, progress: Callable[[int, int], None]
) -> list[AdapterCost]:
    """Every way once in every round; the first round is not counted."""
    if batch < 1 or repeats < 1 or not 1 <= rank <= MAX_RANK:
        raise RequestError(f"--batch and --repeats must be at least 1, --rank 1 .. {MAX_RANK}")
    ways: list[tuple[int, str, tuple[int, ...]]] = [(0, "", ())]
    for name, modules in CHOICES.items():
        first = len(ways) * batch
        slots = tuple(range(first + 1, first + batch + 1))
        for slot in slots:
            decoder.set_adapter(slot, _random_adapter(decoder.config, rank, modules, seed=slot))
        ways.append((batch, name, slots))
    if batch > 1:
        ways.append((1, ways[-1][1], ways[-1][2][:1] * batch))
    times = _times(decoder, batch, [slots for _, _, slots in ways], repeats, progress)
    plain = times[0]
    return [
        AdapterCost(
            count, name, 1e3 * median(took), median(own / base for own, base in zip(took, plain, strict=True))
        )
        for (count, name, _), took in zip(ways, times, strict=True)
    ]


def _times(
    decoder: Decoder,
    batch: int,
    ways: Sequence[tuple[int, ...]],
    repeats: int,
    progress: Callable[[int, int], None],
) -> list[list[float]]:
    """[ways][repeats], seconds of a pass over the newest tokens of all requests."""
    pages = batch * (-(-CONTEXT // PAGE_SIZE) + 1)
    cache, vocab_size = PagedCache(pages), decoder.config.vocab_size
    runner = ModelRunner.allocate(decoder, pages, PAGE_SIZE)
    tokens = random_tokens(CONTEXT, vocab_size)
    requests = [lone_request(cache, tokens, vocab_size, seed=number) for number in range(batch)]
    with Transaction(cache, [PassEntry.of(request, CONTEXT - 1) for request in requests]) as transaction:
        runner.forward(transaction.batch([Draft()] * batch))
        transaction.commit([NOTHING_DRAWN] * batch)
    # Of the processors, where they compute: what else runs on the machine is then no part of it.
    clock = process_time if decoder.device.type == "cpu" else perf_counter
    times: list[list[float]] = [[] for _ in ways]
    with Transaction(cache, [PassEntry.of(request, 1) for request in requests]) as transaction:
        plain = transaction.batch([Draft()] * batch)  # never committed: every pass is the same
        for repeat in range(repeats + 1):
            for took, slots in zip(times, ways, strict=True):
                took.append(_seconds(runner, replace(plain, adapters=slots), clock))
            progress(repeat + 1, repeats + 1)
    return [took[1:] for took in times]


def _seconds(runner: ModelRunner, batch: ForwardBatch, clock: Callable[[], float]) -> float:
    began = clock()
    runner.forward(batch).logits.cpu()  # waits for the device
    return clock() - began


def _random_adapter(config: ModelConfig, rank: int, modules: Sequence[int], seed: int) -> Lora:
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for layer in range(config.num_layers):
        for place, (module, (outputs, inputs)) in enumerate(layer_modules(config, layer).items()):
            if place in modules:
                down = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
                up = torch.randn(outputs, rank, generator=generator) * rank**-0.5
                factors[layer, module] = Factors(down, up)
    return Lora(factors)
