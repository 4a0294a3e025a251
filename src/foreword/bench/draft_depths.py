"""Measures the time of a pass with drafts of several depths, from which the speed-up of a trained drafter follows."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.engine.config import EngineConfig
from foreword.engine.llm import LLM

ROUNDS, TOKENS = 3, 32  # timed answers per depth, taken in turns, and their length
KV_BYTES = 1 << 28  # bytes for keys and values; a training may still have most of the device's memory
PROMPT = "Describe how bread is baked, step by step."


@dataclass(frozen=True)
class DepthTimes:
    """Seconds of a pass with its draft, by the number of draft tokens; 0 is plain decoding."""

    seconds: Mapping[int, float]

    def speed_up(self, tokens_per_pass: float, depth: int) -> float:
        """Return the expected speed relative to plain decoding."""
        return tokens_per_pass * self.seconds[0] / self.seconds[depth]

    def best(self, acceptance_by_level: Sequence[float]) -> tuple[int, float]:
        """Return the depth with the highest expected speed, and that speed relative to plain decoding."""
        survival = accumulate(acceptance_by_level, mul)
        tokens = enumerate(accumulate(survival, initial=1.0))
        speeds = {depth: self.speed_up(count, depth) for depth, count in tokens if depth in self.seconds}
        depth = max(speeds, key=lambda depth: speeds[depth])
        return depth, speeds[depth]


def measure_depth_times(
    model: str, device: str, drafter: Mapping[str, Any], depths: Sequence[int]
) -> DepthTimes:
    """Decode with every depth in turns; `drafter` is a configuration without the number of draft tokens."""
    config = EngineConfig(max_num_seqs=1, kv_cache_memory_bytes=KV_BYTES)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    seconds: dict[int, list[float]] = {depth: [] for depth in (0, *depths)}
    with closing(LLM(model, device=device, speculation="off", config=config)) as llm:
        if llm.engine.kernels is not None:
            llm.engine.kernels.are_awaited = True  # a head drafts nothing until its kernels are loaded
        for round_ in range(ROUNDS + 1):
            for depth, samples in seconds.items():
                llm.speculate({**drafter, "num_speculative_tokens": depth, "fixed": True} if depth else "off")
                answer = llm.generate(PROMPT, params)[0].outputs[0]
                assert answer.stats is not None
                passes = answer.stats.passes - answer.stats.first_passes
                if round_:  # the first round warms up
                    samples.append(answer.stats.decode_seconds / passes)
    return DepthTimes({depth: median(samples) for depth, samples in seconds.items()})
