"""Reads token ids from files in pieces."""

import codecs
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreword.drafters.datastore.format import id_bytes_for
from foreword.errors import RequestError
from foreword.models.tokenization.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]

TOKEN_SUFFIXES = (".npy", ".bin")
"""Suffixes of files with token ids; all other files are text."""

_TEXT_BYTES = 1 << 22
_PIECE = 1 << 20
_PIECE_OF_TEXT = 1 << 16
"""Characters tokenized at once per core."""


def read_ids(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[Ids, int]]:
    """Yield pieces of a file's token ids, each with the bytes of the file that it covers."""
    pieces = (
        _stored_ids(path, tokenizer) if path.suffix.lower() in TOKEN_SUFFIXES else _text_ids(path, tokenizer)
    )
    for ids, size in pieces:
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0]
            raise RequestError(
                f"{path}: token id {wrong} is not in the vocabulary (0 .. {tokenizer.vocab_size - 1}); "
                "name the model whose tokens these are with --model"
            )
        yield ids, size


def _stored_ids(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[Ids, int]]:
    """Yield ids of a `.npy` file with one row of integers, or a `.bin` file of little-endian ints."""
    try:
        if path.suffix.lower() == ".npy":
            stored = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            stored = np.memmap(path, f"<u{id_bytes_for(tokenizer.vocab_size)}", "r")
    except (OSError, ValueError, EOFError) as error:
        raise RequestError(f"{path} cannot be read as token ids: {error}") from None
    if stored.ndim != 1 or stored.dtype.kind not in "iu":
        raise RequestError(
            f"{path}: token ids must be one row of integers, not {stored.dtype} {stored.shape}"
        )
    offset = getattr(stored, "offset", 0)
    for start in range(0, len(stored), _PIECE):  # read, since mapped pages would count as our memory
        size = stored.itemsize
        piece = np.fromfile(
            path, stored.dtype, min(_PIECE, len(stored) - start), offset=offset + start * size
        )
        yield piece.astype(np.int64), piece.nbytes


def _text_ids(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[Ids, int]]:
    """Yield ids of a text file, cut at line ends if possible."""
    decoder, rest = codecs.getincrementaldecoder("utf-8-sig")(), ""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_TEXT_BYTES):
                text = rest + decoder.decode(chunk)
                cut = _cut(text, 0, len(text))
                rest = text[cut:]
                yield _encode(tokenizer, text[:cut]), len(chunk)
            rest += decoder.decode(b"", final=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise RequestError(f"{path} cannot be read as text: {reason}") from None
    if rest:
        yield _encode(tokenizer, rest), 0


def _cut(text: str, start: int, end: int) -> int:
    """Return the last line end between the two, otherwise the last space, otherwise `end`."""
    after_line = text.rfind("\n", start, end) + 1
    space = text.rfind(" ", start + 1, end)
    return after_line if after_line > start else space if space > 0 else end


def _encode(tokenizer: Tokenizer, text: str) -> Ids:
    pieces, start = [], 0
    while start < len(text):
        end = start + _PIECE_OF_TEXT
        cut = len(text) if end >= len(text) else _cut(text, start, end)
        pieces.append(text[start:cut])
        start = cut
    return np.concatenate([np.empty(0, np.int64), *map(_as_array, tokenizer.encode_many(pieces))])


def _as_array(ids: list[int]) -> Ids:
    return np.array(ids, np.int64)
