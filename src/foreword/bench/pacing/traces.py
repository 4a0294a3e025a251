"""Streams as they leave a real engine: when how many tokens came, and how long their events are."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

from foreword.acceptance.params import SamplingParams
from foreword.engine.core import EngineCore
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.errors import RequestError

EVENT_BYTES = 240
"""An event of OpenAI's completion stream without its text."""


class Chunk(NamedTuple):
    """What a watcher of the wire sees of a stream: when, and how many bytes."""

    time: float
    size: int


@dataclass(frozen=True)
class Trace:
    """One answer to one prompt."""

    prompt: int
    repeat: int
    bursts: tuple[tuple[float, tuple[int, ...]], ...]  # time after the first, bytes of each token's text

    @property
    def unevenness(self) -> int:
        """How much the number of tokens changes from one delivery to the next, in all."""
        return sum(abs(len(later) - len(earlier)) for (_, earlier), (_, later) in pairwise(self.bursts))

    def unpaced(self) -> list[Chunk]:
        """As `--stream-pacing burst` sends it: one event for every delivery."""
        return [Chunk(time, EVENT_BYTES + sum(sizes)) for time, sizes in self.bursts]

    def units(self) -> list[tuple[float, list[int]]]:
        """The bursts with one event for every token, to be paced."""
        return [(time, [EVENT_BYTES + size for size in sizes]) for time, sizes in self.bursts]


def short_prompts(count: int) -> list[str]:
    """The first this many of fifty everyday questions."""
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
    """Answer every prompt `repeats` times, alone on the engine, in turns so that a drift of speed hits all alike."""
    traces: list[Trace] = []
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            on_progress(len(traces), repeats * len(prompts))
            traces.append(Trace(number, repeat, _answer(engine, prompt, params, speculate)))
    return traces


def _answer(
    engine: EngineCore, prompt: Sequence[int], params: SamplingParams, speculate: bool
) -> tuple[tuple[float, tuple[int, ...]], ...]:
    engine.add(
        NewRequest("pacing", tuple(prompt), params, speculation={"fixed": True} if speculate else False)
    )
    bursts: list[tuple[float, tuple[int, ...]]] = []
    first, ended = None, False
    while not ended:
        deltas = engine.step()
        now = perf_counter()
        for delta in deltas:
            first = now if first is None else first
            bursts.append((now - first, _sizes(delta)))
            ended = delta.finish_reason is not None
    return tuple(bursts)


def _sizes(delta: AnswerDelta) -> tuple[int, ...]:
    """Bytes of the text in JSON, shared out among the tokens."""
    tokens = max(len(delta.token_ids), 1)
    whole, rest = divmod(len(json.dumps(delta.text, ensure_ascii=False).encode()), tokens)
    return tuple(whole + (place < rest) for place in range(tokens))
