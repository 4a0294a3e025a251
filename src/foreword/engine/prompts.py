"""Converts prompts to token ids for library, server and benchmarks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import SupportsIndex, TypeVar, cast

from foreword.acceptance.params import SamplingParams
from foreword.errors import RequestError
from foreword.models.tokenization.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]
"""Text, token ids, or `{"prompt_token_ids": [...]}` as in vLLM."""

Prediction = str | Sequence[int] | None
"""The answer that a user expects: text or token ids; None: unknown."""


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    raw: bool = False,
    *,
    parse_special: bool = True,
    add_special_tokens: bool = True,
    suffix: str | None = None,
) -> list[int]:
    """Return the token ids of a prompt; text goes through the model's chat template unless `raw`.

    In raw text, names of control tokens become these tokens, as in vLLM and llama.cpp, unless `parse_special` is
    False; in a user message they stay text. With a `suffix`, the prompt is the raw text before a gap and the suffix
    the text after it; names of control tokens stay text in both.
    """
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" not in prompt:
            raise RequestError('a prompt is a string, token ids or {"prompt_token_ids": [...]}')
        prompt = prompt["prompt_token_ids"]
    if not isinstance(prompt, str):
        prompt = _whole_numbers(prompt, "a prompt")
    if suffix:
        return tokenizer.encode_fill(prompt, suffix, add_special_tokens=add_special_tokens)
    if not isinstance(prompt, str):
        return prompt
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens, parse_special=parse_special)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def filling(tokenizer: Tokenizer, params: SamplingParams, suffix: str | None) -> SamplingParams:
    """Return parameters whose stop tokens include those that end an answer in the gap before `suffix`."""
    if not suffix or tokenizer.fill is None or params.ignore_eos:
        return params
    end_ids = tokenizer.fill.ends - tokenizer.eos_ids - {*params.stop_token_ids}
    return replace(params, stop_token_ids=(*params.stop_token_ids, *sorted(end_ids)))


def _whole_numbers(ids: Sequence[int], what: str) -> list[int]:
    """Return token ids as Python ints; accept NumPy and torch integers. `what` names the text in errors."""
    try:
        return [index(token) for token in ids]
    except TypeError:
        raise RequestError(f"the token ids of {what} must be whole numbers") from None


def encode_prediction(tokenizer: Tokenizer, prediction: Prediction) -> tuple[int, ...]:
    """Return the token ids of an expected answer; names of control tokens stay text."""
    if isinstance(prediction, str):
        return tuple(tokenizer.encode(prediction, add_special_tokens=False, parse_special=False))
    return tuple(_whole_numbers(prediction or (), "a prediction"))


ParamsChoice = SamplingParams | Sequence[SamplingParams] | None
"""The same parameters for all prompts, or one set for each; None: the model's defaults."""

_Given = TypeVar("_Given")


def one_per_prompt(given: "_Given | Sequence[_Given]", count: int, what: str) -> "Sequence[_Given]":
    """Return one value per prompt: a single value for each of `count` prompts, or the given list; `what` names it."""
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(
            f"{count} prompts need one for all or a list of {count} {what}, not of {len(given)}"
        )
    return given


def listed_prompts(given: "Prompt | Sequence[Prompt]") -> "Sequence[Prompt]":
    """Return a list of prompts; a list of integers is one prompt."""
    if isinstance(given, str | Mapping) or (
        len(given) and all(isinstance(entry, SupportsIndex) for entry in given)
    ):
        return [cast("Prompt", given)]
    return cast("Sequence[Prompt]", given)


def only_given(params: ParamsChoice, sampling_params: ParamsChoice) -> ParamsChoice:
    """Return `params` or vLLM's `sampling_params`, whichever is given."""
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params are the same; give one")
    return sampling_params if params is None else params


def listed_predictions(given: "Prediction | Sequence[Prediction]", count: int) -> "Sequence[Prediction]":
    """Return one prediction per prompt; a list of token ids applies to all."""
    if isinstance(given, str | None) or all(isinstance(entry, SupportsIndex) for entry in given):
        return [cast("Prediction", given)] * count
    return one_per_prompt(cast("Sequence[Prediction]", given), count, "predictions")
