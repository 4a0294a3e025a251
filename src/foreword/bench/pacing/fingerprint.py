"""How well prompts can be told apart by the timing and size of their streams: nearest neighbour, leave one out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.bench.pacing.traces import Chunk
from foreword.errors import RequestError

Vector = npt.NDArray[np.float64]

_FIRST = 48  # chunks that are compared one by one


@dataclass(frozen=True)
class Guessing:
    """How often a watcher named the right prompt."""

    stream: str  # how it was sent
    features: str  # what the watcher looked at
    right: int
    trials: int
    chance: float

    @property
    def accuracy(self) -> float:
        """Part of the trials that were right."""
        return self.right / self.trials


def features(chunks: Sequence[Chunk]) -> dict[str, Vector]:
    """What a watcher can look at, by name."""
    sizes = np.array([chunk.size for chunk in chunks], dtype=np.float64)
    times = np.array([chunk.time for chunk in chunks], dtype=np.float64)
    gaps = np.diff(times)
    # Logarithms: whether a gap is 5 or 10 ms matters more than whether it is 105 or 110.
    sequence = {"sizes": _fit(sizes), "timing": _fit(np.log1p(1e3 * gaps))}
    totals = np.array([len(chunks), sizes.sum(), times[-1] - times[0]])
    return sequence | {
        "sizes and timing": np.concatenate([sequence["sizes"], sequence["timing"]]),
        "totals": np.log1p(totals),
    }


def guess_prompts(stream: str, watched: Mapping[tuple[int, int], Sequence[Chunk]]) -> list[Guessing]:
    """For every kind of feature: each stream, by (prompt, repeat), is compared with those of all other repeats."""
    keys = sorted(watched)
    repeats = {repeat for _, repeat in keys}
    if len(repeats) < 2:
        raise RequestError("--repeats must be at least 2: one to learn from, one to guess")
    seen = {key: features(chunks) for key, chunks in watched.items()}
    prompts = len({prompt for prompt, _ in keys})
    results = []
    for name in next(iter(seen.values())):
        table = np.stack([seen[key][name] for key in keys])
        right = sum(_hits(table, keys, repeat) for repeat in repeats)
        results.append(Guessing(stream, name, right, len(keys), 1 / prompts))
    return results


def _hits(table: Vector, keys: Sequence[tuple[int, int]], left_out: int) -> int:
    """Right guesses for the streams of one repeat. table: [streams, features]"""
    known = np.array([repeat != left_out for _, repeat in keys])
    names = np.array([prompt for prompt, _ in keys])
    spread = table[known].std(axis=0)
    scaled = (table - table[known].mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    distances = np.linalg.norm(scaled[~known][:, None, :] - scaled[known][None, :, :], axis=2)
    # Of several that are equally near, one by lot: the first would be right too often where all look alike.
    lots = np.random.default_rng(left_out).random(distances.shape)
    nearest = np.lexsort((lots, distances), axis=1)[:, 0]
    return int((names[known][nearest] == names[~known]).sum())


def _fit(values: Vector) -> Vector:
    """The first values. A shorter stream is filled up with its median: how long it is, is among the totals."""
    fitted = np.full(_FIRST, np.median(values) if len(values) else 0.0)
    fitted[: min(len(values), _FIRST)] = values[:_FIRST]
    return fitted
