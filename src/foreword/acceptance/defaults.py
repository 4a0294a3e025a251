"""What a request is sampled with where it does not say."""

from dataclasses import dataclass, field
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.errors import RequestError

GENERATION_CONFIGS = ("auto", "none")
"""`auto`: what the model's makers recommend; `none`: what `SamplingParams` has by itself."""


@dataclass(frozen=True)
class SamplingDefaults:
    """A model's own sampling parameters."""

    values: dict[str, float] = field(default_factory=dict)  # fields of SamplingParams

    def params(self, **given: Any) -> SamplingParams:  # noqa: ANN401 - fields of SamplingParams
        """The parameters of a request that names these; None stands for one that it doesn't name."""
        named = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**self.values, **named})

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


def check_generation_config(name: str) -> None:
    """Refuse a name that means nothing."""
    if name not in GENERATION_CONFIGS:
        raise RequestError(f"generation config {name!r} is unknown; use {' or '.join(GENERATION_CONFIGS)}")
