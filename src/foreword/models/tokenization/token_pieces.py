"""Bytes of single tokens, and fill-in-the-middle tokens."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers

from foreword.errors import TokenizerError

PieceDecoder = Callable[[str], bytes]
"""A function that returns the bytes of a vocabulary entry."""

_BYTE_ENTRY = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"  # stands for a space in sentencepiece's vocabularies


def byte_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level vocabularies.

    As in GPT-2, printable Latin-1 characters stand for themselves, and other bytes for characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_level_decoder() -> PieceDecoder:
    """Return the decoder of byte-level vocabularies."""
    alphabet = byte_alphabet()

    def decode(piece: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in piece])
        except KeyError:  # an added token with plain text, such as several spaces
            return piece.encode("utf-8")

    return decode


def sentencepiece_decoder(piece: str) -> bytes:
    """Decode an entry of a sentencepiece vocabulary with single-byte entries."""
    byte = _BYTE_ENTRY.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace(_WORD_START, " ").encode("utf-8")


def piece_decoder_of(backend: tokenizers.Tokenizer) -> tuple[PieceDecoder, bool]:
    """Return the decoder for a tokenizer.json, and whether decoding strips a leading space of a text."""
    steps = _decoder_steps(backend)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_decoder(), False
    if kinds == ["Metaspace"]:
        return sentencepiece_decoder, steps[0].get("prepend_scheme", "always") != "never"
    if kinds == ["Replace", "ByteFallback", "Fuse"]:
        return sentencepiece_decoder, False
    if kinds == ["Replace", "ByteFallback", "Fuse", "Strip"]:
        return sentencepiece_decoder, steps[3].get("start") == 1  # number of stripped characters
    raise TokenizerError(
        f"tokenizer.json has a decoder ({', '.join(map(str, kinds)) or 'none'}) that is not supported; "
        "use a model with a byte-level or sentencepiece tokenizer"
    )


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())  # the section "decoder" of tokenizer.json
    if decoder.get("type") == "Sequence":
        return list(decoder["decoders"])
    return [decoder]


_FILL_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""Names of fill-in-the-middle tokens: before the prefix, before the suffix and before the middle."""

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
"""Names of further tokens after which the generated middle ends: those that begin a new file, or end the text."""


@dataclass(frozen=True)
class FillTokens:
    """A model's fill-in-the-middle tokens, in prompt order."""

    prefix: int
    suffix: int
    middle: int
    ends: frozenset[int]  # tokens that end the generated middle


def fill_tokens(
    backend: tokenizers.Tokenizer, declared: tuple[int, int, int] | None, declared_ends: Iterable[int]
) -> FillTokens | None:
    """Return the declared fill-in-the-middle tokens, or else those with known names; None if the model has none.

    Also register them with the backend as control tokens, so that their names in a text stay text.
    """
    known = (_ids_of(backend, names) for names in _FILL_NAMES)
    ids = declared or next(filter(None, known), None)
    if ids is None:
        return None
    ends = {token for name in _END_NAMES if (token := backend.token_to_id(name)) is not None}
    fill = FillTokens(*ids, frozenset({*ids, *ends, *declared_ends}))
    added = backend.get_added_tokens_decoder()
    plain = [added[number].content for number in fill.ends if number in added and not added[number].special]
    backend.add_special_tokens(
        [tokenizers.AddedToken(name, normalized=False, special=True) for name in plain]
    )
    return fill


def _ids_of(backend: tokenizers.Tokenizer, names: tuple[str, str, str]) -> tuple[int, int, int] | None:
    """Return the ids of three tokens; None if the vocabulary lacks one of them."""
    prefix, suffix, middle = map(backend.token_to_id, names)
    if prefix is None or suffix is None or middle is None:
        return None
    return prefix, suffix, middle
