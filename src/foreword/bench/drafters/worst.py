"""The prompts that a drafter does worst on: a mean hides them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foreword.bench.drafters.records import Record

LEAST_RATIO = 0.95
"""Of plain decoding, that no single prompt should fall below with what guesses by default."""

MOST_SHOWN = 5


@dataclass(frozen=True)
class Slowest:
    """Of one drafter, the prompts with the lowest speed-up."""

    drafter: str
    prompts: int
    below: int  # prompts with less than `LEAST_RATIO`
    worst: Sequence[tuple[str, str, float]]  # (category, key of the prompt, speed-up), the lowest first

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "line": LEAST_RATIO}

    @property
    def told(self) -> str:
        """One line for people."""
        shown = ", ".join(f"{ratio:.2f}× {category} {key}" for category, key, ratio in self.worst)
        return f"{self.drafter}: {self.below} of {self.prompts} prompts below {LEAST_RATIO:.2f}×; slowest: {shown}"


def slowest_prompts(records: Sequence[Record], most: int = MOST_SHOWN) -> list[Slowest]:
    """For every drafter, in order of appearance."""
    found = []
    for drafter in dict.fromkeys(record.drafter for record in records):
        own = sorted(
            (record.speedup, record.prompt, record.category)
            for record in records
            if record.drafter == drafter
        )
        worst = [(category, key, ratio) for ratio, key, category in own[:most]]
        below = sum(ratio < LEAST_RATIO for ratio, _, _ in own)
        found.append(Slowest(drafter, len(own), below, worst))
    return found
