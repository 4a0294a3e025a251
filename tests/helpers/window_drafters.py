"""Drafters of ours that go by what the target drew, for engines without a model."""

from typing import Any

from foreword.drafters.config import SpeculationConfig
from foreword.drafters.lookup.jacobi import JacobiDrafter
from foreword.drafters.lookup.lookahead import LookaheadConfig, LookaheadDrafter

WINDOW_METHODS = ("jacobi", "lookahead")
WINDOWS: tuple[Any, ...] = (
    {"method": "jacobi", "num_speculative_tokens": 6},
    {"method": "lookahead", "num_speculative_tokens": 5},
    {
        "method": "lookahead",
        "num_speculative_tokens": 30,
        "window_size": 4,
        "ngram_size": 4,
        "guess_set_size": 3,
    },
    {"method": "lookahead", "num_speculative_tokens": 12, "max_depth": 3},
)

WindowDrafter = JacobiDrafter | LookaheadDrafter


def window_drafter(config: SpeculationConfig) -> WindowDrafter:
    if config.method == ("jacobi",):
        return JacobiDrafter()
    return LookaheadDrafter(LookaheadConfig(**dict(config.options)))
