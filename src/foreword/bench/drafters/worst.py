"""The prompts that a drafter does worst on: a mean hides them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foreword.bench.drafters.records import Record, cpu_speedup

LEAST_RATIO = 0.95
"""Of plain decoding, that no single prompt should fall below with what guesses by default."""

MOST_SHOWN = 5

LEAST_TOKENS = 16
"""Of an answer that is judged by itself: a few steps are over before a clock tells them apart."""


@dataclass(frozen=True)
class Slowest:
    """Of one drafter, the prompts with the lowest speed-up."""

    drafter: str
    prompts: int  # with answers of at least `LEAST_TOKENS`
    below: int  # prompts with less than `LEAST_RATIO`
    worst: Sequence[tuple[str, str, float]]  # (category, key of the prompt, speed-up), the lowest first
    cpu_speedup: float | None = (
        None  # over all prompts by the processor's time; None if it did not do the work
    )
    cpu_below: int = 0
    cpu_worst: Sequence[tuple[str, str, float]] = ()

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "line": LEAST_RATIO}

    @property
    def told(self) -> str:
        """One line for people."""
        if not self.prompts:
            return (
                f"{self.drafter}: no plain answer has {LEAST_TOKENS} tokens, so no prompt is judged by itself"
            )
        line = (
            f"{self.drafter}: {self.below} of {self.prompts} prompts below {LEAST_RATIO:.2f}×; "
            f"slowest: {_shown(self.worst)}"
        )
        if self.cpu_speedup is None:
            return line
        return (
            f"{line}; by the processor's time {self.cpu_speedup:.2f}× in all, {self.cpu_below} below: "
            f"{_shown(self.cpu_worst)}"
        )


def slowest_prompts(records: Sequence[Record], most: int = MOST_SHOWN) -> list[Slowest]:
    """For every drafter, in order of appearance."""
    found = []
    for drafter in dict.fromkeys(record.drafter for record in records):
        all_own = [record for record in records if record.drafter == drafter]
        own = [record for record in all_own if record.plain.tokens >= LEAST_TOKENS]
        below, worst = _lowest([(record.speedup, record) for record in own], most)
        by_cpu = [(ratio, record) for record in own if (ratio := cpu_speedup([record])) is not None]
        if len(by_cpu) < len(own):
            found.append(Slowest(drafter, len(own), below, worst))
        else:
            found.append(
                Slowest(drafter, len(own), below, worst, cpu_speedup(all_own), *_lowest(by_cpu, most))
            )
    return found


def _lowest(
    rated: Sequence[tuple[float, Record]], most: int
) -> tuple[int, tuple[tuple[str, str, float], ...]]:
    """How many are below the line, and the lowest of all."""
    ordered = sorted((ratio, record.prompt, record.category) for ratio, record in rated)
    below = sum(ratio < LEAST_RATIO for ratio, _, _ in ordered)
    return below, tuple((category, key, ratio) for ratio, key, category in ordered[:most])


def _shown(prompts: Sequence[tuple[str, str, float]]) -> str:
    return ", ".join(f"{ratio:.2f}× {category} {key}" for category, key, ratio in prompts)
