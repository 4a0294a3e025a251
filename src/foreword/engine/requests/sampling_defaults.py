"""Where a model's own sampling parameters are found."""

from foreword.acceptance.defaults import SamplingDefaults, check_generation_config
from foreword.errors import CheckpointError, RequestError
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.sources.builtin import card_sampling


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
