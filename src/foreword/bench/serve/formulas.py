"""The formulas of the latencies, on the times of one request."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foreword.bench.serve.outcome import Outcome

PERCENTILES = (50, 90, 95, 99)


def time_to_first_token(outcome: Outcome) -> float | None:
    """TTFT: first chunk with text - when the request was due. None: there was no text."""
    return outcome.chunks[0].time - outcome.due if outcome.chunks else None


def end_to_end(outcome: Outcome) -> float | None:
    """E2E: last chunk of the answer - when the request was due."""
    return None if outcome.last is None else outcome.last - outcome.due


def output_tokens(outcome: Outcome) -> int:
    """From usage; else the tokens that chunks say they hold; else one for every chunk with text."""
    if outcome.usage_tokens is not None:
        return outcome.usage_tokens
    if says_tokens(outcome):
        return sum(chunk.tokens or 0 for chunk in outcome.chunks)
    return len(outcome.chunks)


def says_tokens(outcome: Outcome) -> bool:
    """Whether there was text, and every chunk of it said how many tokens it holds."""
    return bool(outcome.chunks) and all(chunk.tokens is not None for chunk in outcome.chunks)


def time_per_output_token(outcome: Outcome) -> float | None:
    """TPOT: (E2E - TTFT) / (output tokens - those of the first chunk). None: no text, or none after that.

    The tokens of the first chunk all came at TTFT. Where it does not say how many they are, one is assumed.
    """
    ttft, e2e = time_to_first_token(outcome), end_to_end(outcome)
    if ttft is None or e2e is None:
        return None
    first = outcome.chunks[0].tokens
    later = output_tokens(outcome) - (1 if first is None else first)
    return (e2e - ttft) / later if later > 0 else None


def gaps(outcome: Outcome) -> list[float]:
    """ITL: the time between two chunks with text, whatever number of tokens the second holds."""
    times = [chunk.time for chunk in outcome.chunks]
    return [after - before for before, after in pairwise(times)]


def gaps_per_token(outcome: Outcome) -> list[float] | None:
    """ITL per token: gap / tokens of the second chunk, once for each of them. None: tokens are not known.

    Text that came with no token of its own (it was held back) leaves its gap to the next chunk.
    """
    if not says_tokens(outcome):
        return None
    per_token: list[float] = []
    held = 0.0
    for gap, chunk in zip(gaps(outcome), outcome.chunks[1:], strict=True):
        held += gap
        if chunk.tokens:
            per_token += [held / chunk.tokens] * chunk.tokens
            held = 0.0
    return per_token


@dataclass(frozen=True)
class Spread:
    """A sample of times in milliseconds: how many, mean and percentiles."""

    n: int
    mean: float | None = None  # None: there is no value
    percentiles: tuple[float, ...] = ()  # one for each of PERCENTILES
    most: float | None = None

    def as_json(self) -> dict[str, float | int | None]:
        """One object; without values only n is not null."""
        points = self.percentiles or (None,) * len(PERCENTILES)
        named = {f"p{percent}_ms": point for percent, point in zip(PERCENTILES, points, strict=True)}
        return {"n": self.n, "mean_ms": self.mean, **named, "max_ms": self.most}


def spread(seconds: Sequence[float]) -> Spread:
    """Percentiles are interpolated linearly between the two nearest values (numpy's default)."""
    if not seconds:
        return Spread(0)
    ms = 1e3 * np.asarray(seconds, dtype=np.float64)
    points = tuple(float(point) for point in np.percentile(ms, PERCENTILES, method="linear"))
    return Spread(len(seconds), float(ms.mean()), points, float(ms.max()))
