"""The tiny tokenizer and the tiny model with tokens that mark a gap in a text."""

from pathlib import Path

import tokenizers

from helpers.tiny_models import TINY_VOCAB, make_hf_model, tiny_tokenizer_json

QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")
"""Of Qwen2.5-Coder, in the order of their ids; its tokenizer.json does not call them special."""
PREFIX, MIDDLE, SUFFIX, PAD = range(TINY_VOCAB, TINY_VOCAB + 4)


def with_tokens(names: tuple[str, ...], *, special: bool = False) -> tokenizers.Tokenizer:
    """The tiny tokenizer with added tokens, from the id TINY_VOCAB on."""
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    backend.add_tokens([tokenizers.AddedToken(name, normalized=False, special=special) for name in names])
    return backend


def make_fill_model(directory: Path) -> Path:
    """A tiny random model whose vocabulary has Qwen's tokens."""
    made = make_hf_model(directory, "qwen2", vocab_size=TINY_VOCAB + len(QWEN))
    (made / "tokenizer.json").write_text(with_tokens(QWEN).to_str(), encoding="utf-8")
    return made
