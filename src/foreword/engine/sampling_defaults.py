"""What a request is sampled with where it does not say."""

from dataclasses import dataclass, field
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.errors import CheckpointError, RequestError
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.sources.builtin import card_sampling

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


def sampling_defaults(checkpoint: Checkpoint, generation_config: str = "auto") -> SamplingDefaults:
    """The model's own, from its files or, for a built-in model, from its makers' card."""
    check_generation_config(generation_config)
    if generation_config == "none":
        return SamplingDefaults()
    defaults = SamplingDefaults(checkpoint.sampling_defaults() or card_sampling(checkpoint.path))
    try:
        defaults.params()
    except RequestError as error:
        raise CheckpointError(
            f"{checkpoint.path}: the model's own sampling parameters cannot be used: {error}; "
            "leave them out with --generation-config none"
        ) from None
    return defaults


def check_generation_config(name: str) -> None:
    """Refuse a name that means nothing."""
    if name not in GENERATION_CONFIGS:
        raise RequestError(f"generation config {name!r} is unknown; use {' or '.join(GENERATION_CONFIGS)}")
