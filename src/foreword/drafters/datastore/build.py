"""Builds a datastore: writes token ids, then sorts the suffixes shard by shard."""

import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
from foreword.drafters.datastore.sources import Ids, read_ids
from foreword.errors import RequestError
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.progress import StageProgress

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int32]

MOST_TOKENS = 1 << 30
"""Maximum number of positions sorted at once: a 64-bit key holds a token and a position."""


def sorted_suffixes(tokens: npt.NDArray[np.integer], count: int, depth: int) -> npt.NDArray[np.int64]:
    """Return the positions 0 ..

    count - 1, sorted by the `depth` tokens from each on; ties by position. `tokens` extend at least `depth` after the
    last position, or end there. Sorting by 1, 2, 4, ... tokens takes the same few rounds for any text; positions with
    a unique rank drop out.
    """
    if len(tokens) > MOST_TOKENS:
        raise ValueError(f"at most {MOST_TOKENS} tokens are sorted at once, not {len(tokens)}")
    keys, length = _first_keys(tokens, depth)
    order, _ = _sorted_places(keys)
    # Rank of each position by `length` tokens: the index in `order` of the first position with the same tokens.
    ranks = np.empty(len(order), np.int32)
    unsettled = _rank(order, keys, np.arange(len(order), dtype=np.int32), ranks)
    while length < depth and len(unsettled):
        starts = order[unsettled]
        after = np.zeros(len(starts), np.uint64)  # 0: past the end
        there = starts < len(ranks) - length
        after[there] = ranks[starts[there] + length].astype(np.uint64) + 1
        # Stable radix order: first by the second half, then by the first half.
        by_last = _sorted_places(after.copy())[0]
        by_first, firsts = _sorted_places(ranks[starts[by_last]].astype(np.uint64))
        placed = by_last[by_first]
        order[unsettled] = starts[placed]
        firsts <<= np.uint64(32)
        firsts |= after[placed]
        unsettled = _rank(order, firsts, unsettled, ranks)
        length *= 2
    return order[order < count].astype(np.int64)


def _first_keys(tokens: npt.NDArray[np.integer], depth: int) -> tuple[Words, int]:
    """Return a sort key per position, and the number of tokens it covers: two if they fit."""
    keys = tokens.astype(np.uint64) + np.uint64(1)  # 0: past the end
    bits = int(keys.max(initial=0)).bit_length()
    if depth < 2 or 2 * bits + len(keys).bit_length() > 64:
        return keys, 1
    return keys << np.uint64(bits) | np.append(keys[1:], np.uint64(0)), 2


def _sorted_places(keys: Words) -> tuple[Ints, Words]:
    """Return the positions of the keys in sorted order (stable), and the sorted keys in place."""
    bits = np.uint64(len(keys).bit_length())
    keys <<= bits
    keys |= np.arange(len(keys), dtype=np.uint64)
    keys.sort()
    places = (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int32)
    keys >>= bits
    return places, keys


def _rank(order: Ints, keys: Words, places: Ints, ranks: Ints) -> Ints:
    """Assign ranks to positions in sorted order; return those that share a rank with others."""
    if not len(places):
        return places
    begins = np.empty(len(keys), bool)
    begins[0] = True
    np.not_equal(keys[1:], keys[:-1], out=begins[1:])
    first_of_each = places[begins]
    group = np.cumsum(begins, dtype=np.int32) - 1
    ranks[order[places]] = first_of_each[group]
    ends = np.append(begins[1:], True)
    shared: Ints = places[~(begins & ends)]
    return shared


SHARD_TOKENS = 1 << 23
"""Token ids sorted at once; sorting takes about 60 bytes per id."""

MOST_TOKENS = (1 << 32) - 1


def build(
    files: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer,
    model: str,
    progress: StageProgress,
    shard_tokens: int = SHARD_TOKENS,
) -> Header:
    """Write a datastore of these files to `out`; on failure, leave nothing there."""
    if os.path.lexists(out):
        raise RequestError(f"{out} exists already; remove it or name another output")
    id_bytes = id_bytes_for(tokenizer.vocab_size)
    with _unfinished(out) as file:
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
    """Writes the file's id section."""

    def __init__(self, file: BinaryIO, id_bytes: int) -> None:
        self._file = file
        self.dtype = np.dtype(f">u{id_bytes}")
        self.tokens = self.separators = self.crc = 0
        file.seek(HEADER_BYTES)

    def add(self, ids: Ids) -> None:
        self.tokens += len(ids)
        if self.tokens > MOST_TOKENS:
            raise RequestError(f"a datastore holds at most {MOST_TOKENS} tokens; make several of fewer files")
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
    sizes = [_size(path) for path in files]
    done = 0
    for path in files:
        for ids, size in read_ids(path, tokenizer):
            writer.add(ids)
            done += size
            progress(f"reading {path.name}", done, sum(sizes))
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
    for first in range(0, writer.tokens, shard_tokens):
        count = min(shard_tokens, writer.tokens - first)
        progress("sorting", first, writer.tokens)
        offset = HEADER_BYTES + first * writer.dtype.itemsize
        reach = min(count + DEPTH, writer.tokens - first)
        window = np.fromfile(file.name, writer.dtype, reach, offset=offset).astype(np.uint32)
        data = (sorted_suffixes(window, count, DEPTH) + first).astype("<u4").tobytes()
        file.write(data)
        crc = zlib.crc32(data, crc)
    progress("sorting", writer.tokens, writer.tokens)
    return crc


@contextmanager
def _unfinished(out: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file next to `out` that is renamed at the end, so that `out` is always complete."""
    new = [folder for folder in out.parents if not folder.exists()]  # deepest first
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.", delete=False) as file:
            try:
                yield file  # type: ignore[misc] # a wrapper that has all of BinaryIO
                Path(file.name).chmod(0o644)
                Path(file.name).rename(out)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except BaseException as error:
        for folder in new:
            with suppress(OSError):  # not empty, or never created
                folder.rmdir()
        if isinstance(error, OSError):
            raise RequestError(f"{out} cannot be written: {error.strerror or error}") from None
        raise
