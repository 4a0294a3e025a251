"""Prompts to token ids, the same for library, server and benchmarks."""

from collections.abc import Mapping, Sequence
from operator import index

from foreword.errors import RequestError
from foreword.models.tokenization.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]
"""Text, token ids, or `{"prompt_token_ids": [...]}` as in vLLM."""


Prediction = str | Sequence[int] | None
"""The answer that a user expects: text or token ids; None: nothing is known."""


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    raw: bool = False,
    *,
    parse_special: bool = True,
    add_special_tokens: bool = True,
) -> list[int]:
    """The token ids of a prompt; text goes through the model's chat template unless `raw`.

    In raw text the names of control tokens become those tokens, as in vLLM and llama.cpp, unless `parse_special` is
    False; in a user's message they stay text.
    """
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" not in prompt:
            raise RequestError('a prompt is a string, token ids or {"prompt_token_ids": [...]}')
        return _whole_numbers(prompt["prompt_token_ids"], "a prompt")
    if not isinstance(prompt, str):
        return _whole_numbers(prompt, "a prompt")
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens, parse_special=parse_special)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _whole_numbers(ids: Sequence[int], what: str) -> list[int]:
    """Token ids as plain ints, numpy's and torch's too."""
    try:
        return [index(token) for token in ids]
    except TypeError:
        raise RequestError(f"the token ids of {what} must be whole numbers") from None


def encode_prediction(tokenizer: Tokenizer, prediction: Prediction) -> tuple[int, ...]:
    """The token ids of an answer that is expected; names of control tokens in it are text."""
    if isinstance(prediction, str):
        return tuple(tokenizer.encode(prediction, add_special_tokens=False, parse_special=False))
    return tuple(_whole_numbers(prediction or (), "a prediction"))
