"""Which bytes a vocabulary entry stands for."""

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from foreword.errors import TokenizerError

PieceDecoder = Callable[[str], bytes]
"""Vocabulary entry -> the bytes it adds to the output."""

_BYTE_ENTRY = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"  # sentencepiece writes a space as this


def byte_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies.

    Bytes that Latin-1 prints stand for themselves; the others take characters from 256 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def byte_level_decoder() -> PieceDecoder:
    """Decoder of byte-level vocabularies (GPT-2 and its heirs)."""
    alphabet = byte_alphabet()

    def decode(piece: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in piece])
        except KeyError:  # an entry that is plain text, such as a run of spaces
            return piece.encode("utf-8")

    return decode


def sentencepiece_decoder(piece: str) -> bytes:
    """Decoder of sentencepiece vocabularies with single-byte entries."""
    byte = _BYTE_ENTRY.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace(_WORD_START, " ").encode("utf-8")


def piece_decoder_of(backend: tokenizers.Tokenizer) -> tuple[PieceDecoder, bool]:
    """The decoder that a tokenizer.json asks for, and whether it drops one leading space of a text."""
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
