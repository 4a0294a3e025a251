"""What a user may ask of sampling."""

import math
from dataclasses import dataclass

from foreword.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when to stop; names and meanings follow OpenAI's and vLLM's."""

    temperature: float = 1.0  # 0 means greedy
    max_tokens: int = 256  # most tokens to generate
    seed: int | None = None  # None: fresh 64-bit entropy, returned with the answer
    ignore_eos: bool = False  # go on after an end-of-sequence token

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature must be a finite number >= 0, not {self.temperature}")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise RequestError(f"seed must be in 0 .. 2**64 - 1, not {self.seed}")
