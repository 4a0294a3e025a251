"""Prompts to token ids, the same for library, server and benchmarks."""

from collections.abc import Mapping, Sequence

from foreword.errors import RequestError
from foreword.models.tokenization.tokenizer import Tokenizer

Prompt = str | Mapping[str, Sequence[int]]
"""Text, or `{"prompt_token_ids": [...]}` as in vLLM."""


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, raw: bool = False) -> list[int]:
    """The token ids of a prompt; text goes through the model's chat template unless `raw`."""
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" not in prompt:
            raise RequestError('a prompt is a string or {"prompt_token_ids": [...]}')
        return list(prompt["prompt_token_ids"])
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])
