"""What chance decides in a run, all of it from the seed: arrivals, the prompts' order, dropped streams."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from foreword.bench.drafters.prompts import BenchPrompt
from foreword.bench.serve.settings import Load


def arrival_times(load: Load) -> Iterator[float]:
    """Seconds after the start at which the requests of an open loop are due: a Poisson process.

    The gaps, the one before the first request included, are exponential with mean 1 / rate.
    """
    if load.rate is None:
        raise ValueError("a closed loop has no arrival times")
    times = itertools.repeat(0.0) if load.rate == math.inf else _poisson(load.rate, load.seed)
    if load.duration is not None:
        limit = load.duration
        times = itertools.takewhile(lambda time: time < limit, times)
    return itertools.islice(times, load.num_requests)


def _poisson(rate: float, seed: int) -> Iterator[float]:
    chance = random.Random(f"{seed} arrivals")
    return itertools.accumulate(chance.expovariate(rate) for _ in itertools.count())


def prompts_in_turn(prompts: Sequence[BenchPrompt], seed: int) -> Iterator[str]:
    """The prompts, shuffled once and then in turn without end: kinds of work are mixed at any time."""
    shuffled = [prompt.text for prompt in prompts]
    random.Random(f"{seed} prompts").shuffle(shuffled)
    return itertools.cycle(shuffled)


def drop_points(share: float, max_tokens: int, seed: int) -> Iterator[int | None]:
    """For every request the number of content chunks after which its stream is dropped; None: never.

    The number is uniform over the first half of the longest answer, so that most answers are still running.
    """
    chance = random.Random(f"{seed} drops")
    while True:
        is_dropped, after = chance.random() < share, chance.randint(1, max(1, max_tokens // 2))
        yield after if is_dropped else None
