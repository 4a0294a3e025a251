"""Measures the time of a target pass by number of new tokens, which determines the gain of speculation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median
from time import perf_counter, sleep
from typing import Protocol

import torch

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.backends.interface import Decoder
from foreword.bench.skeleton import ENGINE_PAUSE, take_turns
from foreword.engine.requests.request import Request
from foreword.errors import RequestError
from foreword.kv.chunks import CHUNK, draft_room
from foreword.progress import Progress
from foreword.proofs.passes import CachedRequests
from foreword.speculation.draft import Draft

PROMPT_REPEATS = 5  # repeats for prompts, which take as long as a hundred steps


@dataclass(frozen=True)
class StepCost:
    """Cost of a pass over `n` new tokens."""

    n: int
    ms: float  # median
    ratio: float  # to the first n measured


@dataclass(frozen=True)
class PromptCost:
    """Cost of a prompt of `n` tokens in one pass."""

    n: int
    ms: float  # median


@dataclass(frozen=True)
class EngineCosts:
    """Costs of all passes and prompts on one engine."""

    steps: list[StepCost]
    prompts: list[PromptCost]


class StepTimer(Protocol):
    """An engine with a computed context that can repeat a pass."""

    def step(self, n: int) -> float:
        """Return the seconds of a pass over n new tokens after the context, with all logits."""

    def prefill(self, count: int) -> float:
        """Return the seconds of a prompt of `count` tokens, with the last one's logits."""


def random_tokens(count: int, vocab_size: int) -> list[int]:
    """Return random tokens, the same for every call."""
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
    return tokens


class DecoderTimer:
    """Times a Foreword decoder: passes over the newest committed token and a chain after it."""

    def __init__(self, target: Decoder, context: int, most_tokens: int) -> None:
        self._vocab_size = target.config.vocab_size
        if target.config.recurrent is not None and most_tokens - 1 > draft_room(context - 1):
            # Round up, so that the draft begins with a chunk: it must end within that chunk.
            context = ceil(context / CHUNK) * CHUNK + 1
        text = random_tokens(context, self._vocab_size)
        self._cached = CachedRequests(target, [text], most_tokens)

    def step(self, n: int) -> float:
        (request,) = self._cached.requests
        return self._seconds(request, Draft.chain(request.tokens[: n - 1], len(request.tokens)))

    def prefill(self, count: int) -> float:
        request = self._cached.open(random_tokens(count, self._vocab_size))
        seconds = self._seconds(request, Draft())
        self._cached.cache.close(request.kv)
        return seconds

    def _seconds(self, request: Request, draft: Draft) -> float:
        with self._cached.batch([draft], [request]) as batch:
            began = perf_counter()
            self._cached.runner.forward(batch).logits.cpu()  # wait for the device
            return perf_counter() - began


def compare_step_cost(
    timers: Mapping[str, StepTimer],
    new_tokens: Sequence[int],
    *,
    prompts: Sequence[int] = (),
    repeats: int = 15,
    progress: Progress | None = None,
) -> dict[str, EngineCosts]:
    """Return by engine the costs of passes over `new_tokens` tokens and of prompts of these lengths, interleaved."""

    def measure(timer: StepTimer, number: int) -> tuple[list[float], list[float]]:
        if len(timers) > 1:
            sleep(ENGINE_PAUSE)
        steps = [timer.step(n) for n in new_tokens]
        return steps, [timer.prefill(n) for n in prompts] if number < PROMPT_REPEATS else []

    arms = {name: partial(measure, timer) for name, timer in timers.items()}
    turns = take_turns(arms, repeats, progress)
    return {name: _costs(samples, new_tokens, prompts) for name, samples in turns.items()}


def _costs(
    samples: Sequence[tuple[list[float], list[float]]], new_tokens: Sequence[int], prompts: Sequence[int]
) -> EngineCosts:
    """Return the medians of an engine's samples, which are (seconds by pass, seconds by prompt) of every round."""
    steps, prefills = zip(*samples, strict=True)
    step_ms = [1e3 * median(times) for times in zip(*steps, strict=True)]
    prompt_ms = [1e3 * median(times) for times in zip(*filter(None, prefills), strict=True)]
    return EngineCosts(
        [StepCost(n, ms, ms / step_ms[0]) for n, ms in zip(new_tokens, step_ms, strict=True)],
        [PromptCost(n, ms) for n, ms in zip(prompts, prompt_ms, strict=True)],
    )


def check_sizes(
    new_tokens: Sequence[int], context: int, repeats: int, context_length: int, prompts: Sequence[int] = ()
) -> None:
    """Raise `RequestError` for impossible sizes."""
    if any(not 1 <= n <= context_length for n in prompts):
        raise RequestError(f"prompts must be 1 .. {context_length} tokens long, the model's context length")
    if not new_tokens or any(not 1 <= n <= MAX_DRAFT_NODES + 1 for n in new_tokens):
        raise RequestError(f"the numbers of new tokens must be in 1 .. {MAX_DRAFT_NODES + 1}")
    if repeats < 1:
        raise RequestError(f"repeats must be at least 1, not {repeats}")
    if not context >= 1 or context + max(new_tokens) > context_length:
        most = f"{context_length}, the model's context length"
        raise RequestError(f"context + new tokens must be in 2 .. {most}")
