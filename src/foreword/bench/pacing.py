"""Measures how well a classifier identifies a prompt by the times and sizes of its stream's chunks."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.acceptance.params import SamplingParams
from foreword.bench.pictures import draw_bars, saved_figure
from foreword.bench.skeleton import take_turns
from foreword.engine.core import EngineCore
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.errors import RequestError

EVENT_BYTES = 240  # size of an OpenAI completion event without its text


class WireChunk(NamedTuple):
    """A chunk of a stream, as an observer of the network sees it."""

    time: float  # seconds since the first chunk
    size: int  # bytes


@dataclass(frozen=True)
class Trace:
    """The bursts of one answer: the tokens that one step commits form a burst."""

    prompt: int  # index of the prompt
    repeat: int
    # Per burst: seconds since the first one, and the bytes of each token's text.
    bursts: tuple[tuple[float, tuple[int, ...]], ...]

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt, self.repeat

    @property
    def unevenness(self) -> int:
        """Sum of the changes in tokens per burst."""
        return sum(abs(len(later) - len(earlier)) for (_, earlier), (_, later) in pairwise(self.bursts))

    def unpaced(self) -> list[WireChunk]:
        """Return the chunks of `--stream-pacing burst`: one event per burst."""
        return [WireChunk(time, EVENT_BYTES + sum(sizes)) for time, sizes in self.bursts]

    def units(self) -> list[tuple[float, list[int]]]:
        """Return per burst its time in seconds and the bytes of its events, of which each has one token."""
        return [(time, [EVENT_BYTES + size for size in sizes]) for time, sizes in self.bursts]


def short_prompts(count: int) -> list[str]:
    """Return the first `count` of fifty everyday questions."""
    text = (files("foreword.bench") / "data" / "short_prompts.txt").read_text(encoding="utf-8")
    known = text.splitlines()
    if count > len(known):
        raise RequestError(f"there are {len(known)} prompts; lower --prompts")
    return known[:count]


def record(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    repeats: int,
    params: SamplingParams,
    speculate: bool,
    on_progress: Callable[[int, int], None],
) -> list[Trace]:
    """Return the traces of every prompt, answered `repeats` times; prompts take turns, one at a time."""
    arms = {
        str(number): partial(_trace, engine, prompt, params, speculate, number)
        for number, prompt in enumerate(prompts)
    }
    traces = take_turns(arms, repeats, on_progress, warm_up=0)
    return [traces[name][repeat] for repeat in range(repeats) for name in arms]


def _trace(
    engine: EngineCore,
    prompt: Sequence[int],
    params: SamplingParams,
    speculate: bool,
    number: int,
    repeat: int,
) -> Trace:
    """Answer prompt `number` once on an idle engine; return the bursts."""
    speculation = {"fixed": True} if speculate else False
    engine.add(NewRequest("pacing", tuple(prompt), params, speculation=speculation))
    bursts: list[tuple[float, tuple[int, ...]]] = []
    first, ended = None, False
    while not ended:
        deltas = engine.step()
        now = perf_counter()
        for delta in deltas:
            first = now if first is None else first
            bursts.append((now - first, _sizes(delta)))
            ended = delta.finish_reason is not None
    return Trace(number, repeat, tuple(bursts))


def _sizes(delta: AnswerDelta) -> tuple[int, ...]:
    """Return bytes per token: those of the text in JSON, divided evenly between the tokens."""
    tokens = max(len(delta.token_ids), 1)
    each, remaining = divmod(len(json.dumps(delta.text, ensure_ascii=False).encode()), tokens)
    return (each + 1,) * remaining + (each,) * (tokens - remaining)


Vector = npt.NDArray[np.float64]

_COMPARED = 48  # number of a stream's first chunks that are compared one by one


@dataclass(frozen=True)
class ClassifierResult:
    """Number of prompts that an observer identified."""

    stream: str  # kind of pacing
    features: str  # kind of observed features
    right: int
    trials: int
    chance: float

    @property
    def accuracy(self) -> float:
        """Fraction of right answers."""
        return self.right / self.trials


def features(chunks: Sequence[WireChunk]) -> dict[str, Vector]:
    """Return the feature vectors of a stream by kind of feature."""
    sizes = np.array([chunk.size for chunk in chunks], dtype=np.float64)
    times = np.array([chunk.time for chunk in chunks], dtype=np.float64)
    gaps = np.diff(times)
    # Logarithms: the difference of 5 and 10 ms matters more than that of 105 and 110.
    sequence = {"sizes": _fit(sizes), "timing": _fit(np.log1p(1e3 * gaps))}
    totals = np.array([len(chunks), sizes.sum(), times[-1] - times[0]])
    return sequence | {
        "sizes and timing": np.concatenate([sequence["sizes"], sequence["timing"]]),
        "totals": np.log1p(totals),
    }


def classify_prompts(
    stream: str, watched: Mapping[tuple[int, int], Sequence[WireChunk]]
) -> list[ClassifierResult]:
    """Return the classifier's result for each kind of feature; `watched` has the streams by (prompt, repeat).

    A stream is classified by the most similar stream of the other repeats. `stream` names the kind of pacing.
    """
    keys = sorted(watched)
    repeats = {repeat for _, repeat in keys}
    if len(repeats) < 2:
        raise RequestError("--repeats must be at least 2: one to learn from, one to classify")
    by_stream = [features(watched[key]) for key in keys]
    chance = 1 / len({prompt for prompt, _ in keys})
    results = []
    for name in by_stream[0]:
        table = np.stack([vectors[name] for vectors in by_stream])
        right = sum(_hits(table, keys, repeat) for repeat in repeats)
        results.append(ClassifierResult(stream, name, right, len(keys), chance))
    return results


def _hits(table: Vector, keys: Sequence[tuple[int, int]], left_out: int) -> int:
    """Count the streams of repeat `left_out` that are classified correctly by all other repeats.

    `table` is [streams, features]; `keys` has the (prompt, repeat) of each stream.
    """
    known = np.array([repeat != left_out for _, repeat in keys])
    names = np.array([prompt for prompt, _ in keys])
    spread = table[known].std(axis=0)
    scaled = (table - table[known].mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    # [streams of the repeat, other streams]
    distances = np.linalg.norm(scaled[~known][:, None, :] - scaled[known][None, :, :], axis=2)
    # Ties are broken randomly; otherwise streams that all look alike would be classified too well.
    tie_breakers = np.random.default_rng(left_out).random(distances.shape)
    nearest = np.lexsort((tie_breakers, distances), axis=1)[:, 0]
    return int((names[known][nearest] == names[~known]).sum())


def _fit(values: Vector) -> Vector:
    """Return the first `_COMPARED` values; fewer are padded with their median, since length is a separate feature."""
    fitted = np.full(_COMPARED, np.median(values) if len(values) else 0.0)
    fitted[: min(len(values), _COMPARED)] = values[:_COMPARED]
    return fitted


_SHOWN_SECONDS = 1.0


def plot_pacing(
    examples: dict[str, Sequence[WireChunk]], rows: Sequence[ClassifierResult], path: Path
) -> None:
    """Draw chunks by kind of stream (left), and the classifier's accuracy (right)."""
    with saved_figure(path, 11.0, 5.0) as figure:
        grid = figure.add_gridspec(len(examples), 2, width_ratios=(3, 2))
        first = None
        for index, (name, chunks) in enumerate(examples.items()):
            axes = figure.add_subplot(grid[index, 0], sharex=first)
            first = first or axes
            _draw_chunks(axes, name, chunks)
        axes.set_xlabel("milliseconds after the first token")
        _draw_accuracy(figure.add_subplot(grid[:, 1]), rows)


def _draw_chunks(axes: Any, name: str, chunks: Sequence[WireChunk]) -> None:  # noqa: ANN401 - an optional package
    shown = [chunk for chunk in chunks if chunk.time <= _SHOWN_SECONDS]
    axes.vlines([1e3 * chunk.time for chunk in shown], 0, [chunk.size for chunk in shown], linewidth=1.5)
    axes.set_ylim(0, 1.15 * max(chunk.size for chunk in shown))
    axes.set_ylabel("bytes")
    axes.set_title(name, fontsize=10, loc="left")


def _draw_accuracy(axes: Any, rows: Sequence[ClassifierResult]) -> None:  # noqa: ANN401 - an optional package
    heights: dict[str, dict[str, float]] = {}
    for row in rows:
        heights.setdefault(row.stream, {})[row.features] = 100 * row.accuracy
    draw_bars(axes, heights, (100 * rows[0].chance, "chance"), "%.0f")
    axes.set_ylabel("prompts named right, %")
    axes.set_ylim(0, 110)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
