"""What callers give for one prompt or for many."""

from collections.abc import Mapping, Sequence
from typing import SupportsIndex, TypeVar, cast

from foreword.acceptance.params import SamplingParams
from foreword.engine.requests.prompts import Prediction, Prompt
from foreword.errors import RequestError

ParamsChoice = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts or one for each; None: the model's own."""

_Given = TypeVar("_Given")


def spread(given: "_Given | Sequence[_Given]", count: int, what: str) -> "Sequence[_Given]":
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(
            f"{count} prompts need one for all or a list of {count} {what}, not of {len(given)}"
        )
    return given


def listed_prompts(given: "Prompt | Sequence[Prompt]") -> "Sequence[Prompt]":
    """A list of whole numbers is one prompt."""
    if isinstance(given, str | Mapping) or (
        len(given) and all(isinstance(entry, SupportsIndex) for entry in given)
    ):
        return [cast("Prompt", given)]
    return cast("Sequence[Prompt]", given)


def either(params: ParamsChoice, sampling_params: ParamsChoice) -> ParamsChoice:
    """Our name or vLLM's."""
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params are the same; give one")
    return sampling_params if params is None else params


def listed_predictions(given: "Prediction | Sequence[Prediction]", count: int) -> "Sequence[Prediction]":
    """One for every prompt; a list of token ids is one for all."""
    if isinstance(given, str | None) or all(isinstance(entry, SupportsIndex) for entry in given):
        return [cast("Prediction", given)] * count
    return spread(cast("Sequence[Prediction]", given), count, "predictions")
