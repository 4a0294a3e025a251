"""Fill-in-the-middle tokens: how models mark the text before and after a gap, as data."""

from collections.abc import Iterable
from dataclasses import dataclass

import tokenizers

_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""Names of the tokens before the prefix, before the suffix and before the middle."""

_END_NAMES = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "<|repo_name|>",
    "<repo_name>",
    "<reponame>",
    "<|file_sep|>",
    "<file_sep>",
    "<|file_separator|>",
    "<filename>",
    "<|EOT|>",
    "▁<EOT>",
)
"""Tokens that end a filled gap besides those that end an answer: another file would begin, or the text is over."""


@dataclass(frozen=True)
class FillTokens:
    """A model's tokens, in the order in which a prompt has them: prefix, suffix, middle."""

    prefix: int
    suffix: int
    middle: int
    ends: frozenset[int]  # any of these ends the middle


def fill_tokens(
    backend: tokenizers.Tokenizer, stated: tuple[int, int, int] | None, stated_ends: Iterable[int]
) -> FillTokens | None:
    """Return the tokens that a file states, or those of known names; None if the model has none.

    The backend reads all of them as control tokens afterwards, so that no text forges them.
    """
    found = stated or next((ids for names in _NAMES if (ids := _known(backend, names))), None)
    if found is None:
        return None
    ends = {token for name in _END_NAMES if (token := backend.token_to_id(name)) is not None}
    fill = FillTokens(*found, frozenset({*found, *ends, *stated_ends}))
    added = backend.get_added_tokens_decoder()
    plain = [added[number].content for number in fill.ends if number in added and not added[number].special]
    backend.add_special_tokens(
        [tokenizers.AddedToken(name, normalized=False, special=True) for name in plain]
    )
    return fill


def _known(backend: tokenizers.Tokenizer, names: tuple[str, str, str]) -> tuple[int, int, int] | None:
    prefix, suffix, middle = map(backend.token_to_id, names)
    if prefix is None or suffix is None or middle is None:
        return None
    return prefix, suffix, middle
