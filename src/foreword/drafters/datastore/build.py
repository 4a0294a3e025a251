"""Builds a datastore: reads texts, writes token ids, then sorts the suffixes shard by shard."""

import codecs
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from foreword.drafters.datastore.format import (
    DEPTH,
    HEADER_BYTES,
    LISTED_SOURCES,
    PADDING,
    Header,
    fingerprint,
    id_bytes_for,
    separator,
    write_header,
)
from foreword.errors import RequestError
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.models.unfinished import unfinished
from foreword.progress import StageProgress

Ids = npt.NDArray[np.int64]

TOKEN_SUFFIXES = (".npy", ".bin")  # suffixes of files with token ids; all other files are text
_TEXT_BYTES = 1 << 22  # bytes of a text file that are read at once
_PIECE = 1 << 20  # stored token ids that are read at once
_PIECE_OF_TEXT = 1 << 16  # characters tokenized at once per core


def read_ids(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[Ids, int]]:
    """Yield a file's token ids in pieces, each with the number of bytes read for it."""
    read = _stored_ids if path.suffix.lower() in TOKEN_SUFFIXES else _text_ids
    for ids, size in read(path, tokenizer):
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0]
            raise RequestError(
                f"{path}: token id {wrong} is not in the vocabulary (0 .. {tokenizer.vocab_size - 1}); "
                "name the model whose tokens these are with --model"
            )
        yield ids, size


def _stored_ids(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[Ids, int]]:
    """Yield the ids in a `.npy` file with one row of integers, or in a `.bin` file of little-endian integers."""
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
    for start in range(0, len(stored), _PIECE):
        # Not read from the mapping, whose pages would count as memory of this process.
        count, begin = min(_PIECE, len(stored) - start), offset + start * stored.itemsize
        piece = np.fromfile(path, stored.dtype, count, offset=begin)
        yield piece.astype(np.int64), piece.nbytes


def _text_ids(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[Ids, int]]:
    """Tokenize a text file and yield its ids; pieces end at line ends if possible."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    unfinished_line = ""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_TEXT_BYTES):
                text = unfinished_line + decoder.decode(chunk)
                cut = _cut(text, 0, len(text))
                unfinished_line = text[cut:]
                yield _encode(tokenizer, text[:cut]), len(chunk)
            unfinished_line += decoder.decode(b"", final=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise RequestError(f"{path} cannot be read as text: {reason}") from None
    if unfinished_line:
        yield _encode(tokenizer, unfinished_line), 0


def _cut(text: str, start: int, end: int) -> int:
    """Return where to cut: after the last line end in [start, end), else before the last space, else at `end`."""
    line_end = text.rfind("\n", start, end)
    if line_end >= 0:
        return line_end + 1
    space = text.rfind(" ", start + 1, end)
    return space if space > 0 else end


def _encode(tokenizer: Tokenizer, text: str) -> Ids:
    """Tokenize a text in pieces, so that all cores are used."""
    pieces, start = [], 0
    while start < len(text):
        end = start + _PIECE_OF_TEXT
        cut = len(text) if end >= len(text) else _cut(text, start, end)
        pieces.append(text[start:cut])
        start = cut
    encoded = [np.array(ids, np.int64) for ids in tokenizer.encode_many(pieces)]
    return np.concatenate([np.empty(0, np.int64), *encoded])


Keys = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int32]

MOST_SORTED = 1 << 30  # maximum number of positions sorted at once: a 64-bit key holds a token and a position


def sorted_suffixes(tokens: npt.NDArray[np.integer], count: int, depth: int) -> npt.NDArray[np.int64]:
    """Return the first `count` positions, sorted by the `depth` tokens from each position on; ties by position.

    `tokens` also has the `depth` tokens after these positions, as far as the text goes. Positions are sorted by 1, 2,
    4, ... tokens (prefix doubling), so that any text takes the same few rounds. A position with a unique rank is not
    sorted again.
    """
    if len(tokens) > MOST_SORTED:
        raise ValueError(f"at most {MOST_SORTED} tokens are sorted at once, not {len(tokens)}")
    keys, length = _first_keys(tokens, depth)
    order, _ = _sort(keys)
    # Rank of each position by `length` tokens: the index in `order` of the first position with the same tokens.
    ranks = np.empty(len(order), np.int32)
    unsettled = _rank(order, keys, np.arange(len(order), dtype=np.int32), ranks)
    while length < depth and len(unsettled):
        starts = order[unsettled]
        after = np.zeros(len(starts), np.uint64)  # 0: past the end
        is_inside = starts < len(ranks) - length
        after[is_inside] = ranks[starts[is_inside] + length].astype(np.uint64) + 1
        # Two stable sorts, as in radix sort: by the second half of the tokens, then by the first half.
        by_second = _sort(after.copy())[0]
        by_first, keys = _sort(ranks[starts[by_second]].astype(np.uint64))
        by_both = by_second[by_first]
        order[unsettled] = starts[by_both]
        keys <<= np.uint64(32)
        keys |= after[by_both]
        unsettled = _rank(order, keys, unsettled, ranks)
        length *= 2
    return order[order < count].astype(np.int64)


def _first_keys(tokens: npt.NDArray[np.integer], depth: int) -> tuple[Keys, int]:
    """Return a sort key per position, and the number of tokens it covers: two if they fit."""
    keys = tokens.astype(np.uint64) + np.uint64(1)  # 0: past the end
    bits = int(keys.max(initial=0)).bit_length()
    if depth < 2 or 2 * bits + len(keys).bit_length() > 64:
        return keys, 1
    return keys << np.uint64(bits) | np.append(keys[1:], np.uint64(0)), 2


def _sort(keys: Keys) -> tuple[Ints, Keys]:
    """Sort the keys in place (stable); return their former indices, and the sorted keys."""
    bits = np.uint64(len(keys).bit_length())
    keys <<= bits
    keys |= np.arange(len(keys), dtype=np.uint64)
    keys.sort()
    indices = (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int32)
    keys >>= bits
    return indices, keys


def _rank(order: Ints, keys: Keys, slots: Ints, ranks: Ints) -> Ints:
    """Set the ranks of the positions in these slots of `order` by their sorted keys; return slots with equal ranks."""
    if not len(slots):
        return slots
    is_first = np.empty(len(keys), bool)  # whether a key differs from the key before it
    is_first[0] = True
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    group = np.cumsum(is_first, dtype=np.int32) - 1  # number of each key's group of equal keys
    ranks[order[slots]] = slots[is_first][group]
    is_last = np.append(is_first[1:], True)
    with_equal_keys: Ints = slots[~(is_first & is_last)]
    return with_equal_keys


SHARD_TOKENS = 1 << 23  # token ids sorted at once; sorting takes about 60 bytes per id
MOST_TOKENS = (1 << 32) - 1  # maximum token ids of a datastore: positions are 32-bit numbers


def build(
    files: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer,
    model: str,
    progress: StageProgress,
    shard_tokens: int = SHARD_TOKENS,
) -> Header:
    """Write a datastore of these files to `out`, which is not created if that fails; return its header."""
    if os.path.lexists(out):
        raise RequestError(f"{out} exists already; remove it or name another output")
    id_bytes = id_bytes_for(tokenizer.vocab_size)
    with unfinished(out) as path, path.open("w+b") as file:
        writer = _IdWriter(file, id_bytes)
        _write_ids(writer, files, tokenizer, progress)
        if not writer.tokens - writer.separators:
            raise RequestError(f"there are no tokens in {', '.join(map(str, files))}")
        order_start = writer.finish()
        order_crc = _write_order(file, writer, order_start, shard_tokens, progress)
        header = Header(
            tokens=writer.tokens,
            id_bytes=id_bytes,
            shard_tokens=shard_tokens,
            depth=DEPTH,
            vocab_size=tokenizer.vocab_size,
            tokenizer=fingerprint(tokenizer),
            model=model,
            sources=tuple(path.name for path in files[:LISTED_SOURCES]),
            files=len(files),
            ids_crc=writer.crc,
            order_crc=order_crc,
        )
        write_header(file, header)
    return header


class _IdWriter:
    """Writes the token ids of a datastore, and their checksum."""

    def __init__(self, file: BinaryIO, id_bytes: int) -> None:
        self._file = file
        self.dtype = np.dtype(f">u{id_bytes}")
        self.tokens = self.separators = self.crc = 0
        file.seek(HEADER_BYTES)

    def add(self, ids: Ids) -> None:
        self.tokens += len(ids)
        if self.tokens > MOST_TOKENS:
            raise RequestError(
                f"a datastore holds at most {MOST_TOKENS} tokens; build several datastores of fewer files each"
            )
        self._write(ids.astype(self.dtype).tobytes())

    def end_text(self) -> None:
        """Write a separator: the next text does not continue this one."""
        self.add(np.array([separator(self.dtype.itemsize)]))
        self.separators += 1

    def finish(self) -> int:
        """Write the padding; return the offset of the next section."""
        end = HEADER_BYTES + self.tokens * self.dtype.itemsize
        start = -(-(end + PADDING) // 8) * 8
        self._write(b"\xff" * (start - end))
        self._file.flush()
        return start

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)


def _write_ids(
    writer: _IdWriter, files: Sequence[Path], tokenizer: Tokenizer, progress: StageProgress
) -> None:
    total, done = sum(map(_size, files)), 0
    for path in files:
        for ids, size in read_ids(path, tokenizer):
            writer.add(ids)
            done += size
            progress(f"reading {path.name}", done, total)
        writer.end_text()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from None


def _write_order(
    file: BinaryIO, writer: _IdWriter, start: int, shard_tokens: int, progress: StageProgress
) -> int:
    """Write the sorted positions of every shard; return their checksum."""
    file.seek(start)
    crc = 0
    for first in range(0, writer.tokens, shard_tokens):  # a shard's first position
        count = min(shard_tokens, writer.tokens - first)
        progress("sorting", first, writer.tokens)
        offset = HEADER_BYTES + first * writer.dtype.itemsize
        window_tokens = min(count + DEPTH, writer.tokens - first)  # suffixes extend into the next shard
        window = np.fromfile(file.name, writer.dtype, window_tokens, offset=offset).astype(np.uint32)
        data = (sorted_suffixes(window, count, DEPTH) + first).astype("<u4").tobytes()
        file.write(data)
        crc = zlib.crc32(data, crc)
    progress("sorting", writer.tokens, writer.tokens)
    return crc
