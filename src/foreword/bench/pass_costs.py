"""Measures the time of judging drafts, and the time that LoRA adapters add to a pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Annotated

import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement
from foreword.acceptance.judge import judge
from foreword.acceptance.logprobs import request_logprobs
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.backends.interface import Decoder
from foreword.bench.skeleton import InTable, median_ratio, take_turns
from foreword.bench.step_cost import random_tokens
from foreword.errors import RequestError
from foreword.models.adapters import MAX_RANK, MODULES, Factors, Lora, layer_modules
from foreword.models.config import ModelConfig
from foreword.progress import Progress
from foreword.proofs.passes import CachedRequests
from foreword.speculation.draft import Draft, stack

ADAPTER_CONTEXT = 64  # committed tokens per request with an adapter
ADAPTED = {"q, v": (0, 2), "q, k, v, o": (0, 1, 2, 3), "all seven": tuple(range(len(MODULES)))}
"""Adapted modules, by index in `MODULES`."""


@dataclass(frozen=True)
class AcceptCost:
    """Time of judging the drafts of one batch."""

    requests: Annotated[int, InTable("requests")]  # number of requests, with one chain each
    ms: Annotated[float, InTable("ms", ".2f")]  # median
    ms_per_request: Annotated[float, InTable("ms per request", ".2f")]
    # Time per request relative to the pass of one request.
    ratio: Annotated[float, InTable("ratio to the pass", ".3f")]


def measure_accept_cost(
    target: Decoder,
    tokens: Sequence[int],
    params: SamplingParams,
    chain: int,
    rule: Rule,
    batches: Sequence[int],
    repeats: int,
    progress: Progress,
) -> tuple[list[AcceptCost], float]:
    """Return the costs of judging batches of chains, and the ms of a target pass over one request's chain.

    The chain is the end of the text `tokens`, so that logits are realistic. All are measured interleaved.
    """
    if chain < 0 or len(tokens) < chain + 2 or repeats < 1 or not batches or min(batches) < 1:
        raise RequestError(
            "the text must be longer than the chain, which may be empty; repeats and batch sizes at least 1"
        )
    text, drafted = tokens[: len(tokens) - chain], tokens[len(tokens) - chain :]
    cached, draft = CachedRequests(target, [text], chain), Draft.chain(drafted, len(text))
    logits = torch.empty(0)  # [chain + 1, vocab] of the newest pass

    def verify(_: int) -> float:
        nonlocal logits
        with cached.batch([draft]) as batch:
            began = perf_counter()
            logits = cached.runner.forward(batch).logits
            logits[0, 0].item()  # wait for the device
            return perf_counter() - began

    def accept(size: int, _: int) -> float:
        limits = TokenLimits(logits.shape[1])
        samplers = [RequestSampler(params, limits, text, seed, rule=rule) for seed in range(size)]
        return _accept_seconds(torch.cat([logits] * size), draft, samplers)

    arms = {"verify": verify} | {str(size): partial(accept, size) for size in batches}
    times = {name: 1e3 * median(seconds) for name, seconds in take_turns(arms, repeats, progress).items()}
    verify_ms = times.pop("verify")
    costs = [(size, times[str(size)]) for size in batches]
    return [AcceptCost(n, ms, ms / n, ms / n / verify_ms) for n, ms in costs], verify_ms


def _accept_seconds(logits: Tensor, draft: Draft, samplers: Sequence[RequestSampler]) -> float:
    """Return the seconds of judging the same draft for every sampler, and of reading the verdicts."""
    began = perf_counter()
    judged = Judgement.of(logits, stack([draft] * len(samplers)), samplers)
    verdicts = judge(judged)
    for index in range(len(samplers)):
        if verdicts.error(index) is None:  # read what the engine reads
            verdicts.paths[index], verdicts.tokens(judged.trees, index)
            request_logprobs(judged, verdicts, index)
    return perf_counter() - began


@dataclass(frozen=True)
class AdapterCost:
    """Time of a pass in which every request has an adapter."""

    # Number of distinct adapters.
    adapters: Annotated[int, InTable("adapters", lambda count: str(count or "none"))]
    modules: Annotated[str, InTable("modules")]
    ms: Annotated[float, InTable("ms", ".2f")]  # median
    ratio: Annotated[float, InTable("x none", ".3f")]  # median ratio to the pass without adapters


def measure_adapters(
    decoder: Decoder, batch: int, rank: int, repeats: int, progress: Progress
) -> list[AdapterCost]:
    """Measure a pass over the newest tokens of `batch` requests: without adapters, then with each set of modules.

    Every request has an adapter of its own; last, all requests share one.
    """
    if batch < 1 or repeats < 1 or not 1 <= rank <= MAX_RANK:
        raise RequestError(f"--batch and --repeats must be at least 1, --rank 1 .. {MAX_RANK}")
    # Number of distinct adapters, names of the adapted modules, and the adapter slot of each request.
    settings: list[tuple[int, str, tuple[int, ...]]] = [(0, "", ())]
    for name, modules in ADAPTED.items():
        first = len(settings) * batch
        slots = tuple(range(first + 1, first + batch + 1))
        for slot in slots:
            decoder.set_adapter(slot, _random_adapter(decoder.config, rank, modules, seed=slot))
        settings.append((batch, name, slots))
    if batch > 1:
        settings.append((1, settings[-1][1], settings[-1][2][:1] * batch))
    text = random_tokens(ADAPTER_CONTEXT, decoder.config.vocab_size)
    cached = CachedRequests(decoder, [text] * batch, 1)
    # On a CPU, CPU time excludes other processes.
    clock: Callable[[], float] = process_time if decoder.device.type == "cpu" else perf_counter
    with cached.batch([Draft()] * batch) as plain:

        def seconds(slots: tuple[int, ...], _: int) -> float:
            adapted = replace(plain, adapters=slots)
            began = clock()
            cached.runner.forward(adapted).logits.cpu()  # wait for the device
            return clock() - began

        arms = {str(index): partial(seconds, slots) for index, (_, _, slots) in enumerate(settings)}
        times = list(take_turns(arms, repeats, progress).values())
    return [
        AdapterCost(count, name, 1e3 * median(arm_times), median_ratio(arm_times, times[0]))
        for (count, name, _), arm_times in zip(settings, times, strict=True)
    ]


def _random_adapter(config: ModelConfig, rank: int, modules: Sequence[int], seed: int) -> Lora:
    """Return an adapter of these modules (indices in `MODULES`) of all layers, with random factors."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for layer in range(config.num_layers):
        for index, (module, (outputs, inputs)) in enumerate(layer_modules(config, layer).items()):
            if index in modules:
                down = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
                up = torch.randn(outputs, rank, generator=generator) * rank**-0.5
                factors[layer, module] = Factors(down, up)
    return Lora(factors)
