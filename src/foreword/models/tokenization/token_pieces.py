"""Bytes of single tokens, and fill-in-the-middle tokens."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers

from foreword.errors import TokenizerError

PieceDecoder = Callable[[str], bytes]
"""Vocabulary entry -> bytes that it adds to the output."""

_BYTE_ENTRY = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"  # sentencepiece's space


def byte_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level vocabularies.

    Printable Latin-1 bytes stand for themselves; the others are mapped to characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def byte_level_decoder() -> PieceDecoder:
    alphabet = byte_alphabet()

    def decode(piece: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in piece])
        except KeyError:  # plain text, such as a run of spaces
            return piece.encode("utf-8")

    return decode


def sentencepiece_decoder(piece: str) -> bytes:
    """Decode an entry of a sentencepiece vocabulary with single-byte entries."""
    byte = _BYTE_ENTRY.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace(_WORD_START, " ").encode("utf-8")


def piece_decoder_of(backend: tokenizers.Tokenizer) -> tuple[PieceDecoder, bool]:
    """Return the decoder for a tokenizer.json, and whether it drops a leading space of a text."""
    steps = _decoder_steps(backend)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_decoder(), False
    if kinds == ["Metaspace"]:
        return sentencepiece_decoder, steps[0].get("prepend_scheme", "always") != "never"
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        return sentencepiece_decoder, bool(kinds[3:]) and steps[3].get("start") == 1
    raise TokenizerError(
        f"tokenizer.json has a decoder ({', '.join(map(str, kinds)) or 'none'}) that is not supported; "
        "use a model with a byte-level or sentencepiece tokenizer"
    )


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())  # its part of tokenizer.json
    if decoder.get("type") == "Sequence":
        return list(decoder["decoders"])
    return [decoder]


_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""Names of the tokens before prefix, suffix and middle."""

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
"""Additional tokens that end a filled gap: a new file starts, or the text ends."""


@dataclass(frozen=True)
class FillTokens:
    """A model's fill-in-the-middle tokens, in prompt order."""

    prefix: int
    suffix: int
    middle: int
    ends: frozenset[int]  # tokens that end the middle


def fill_tokens(
    backend: tokenizers.Tokenizer, stated: tuple[int, int, int] | None, stated_ends: Iterable[int]
) -> FillTokens | None:
    """Return the declared tokens, or those with known names; None if the model has none.

    They are registered as control tokens, so that no text can forge them.
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
