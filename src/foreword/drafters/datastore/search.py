"""Finds where the end of a text occurs in a datastore, and what followed there.

Each shard of a datastore has a suffix array: the positions of its tokens, sorted by the ids that begin there. One
vectorised bisection searches all shards for all lengths of the text's end at once, so that interpreter overhead does
not grow with shards and lengths. Suffixes are compared as byte strings, which sort like the ids.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreword.drafters.datastore.format import HEADER_BYTES, Header, read_header

Ints = npt.NDArray[np.int64]
Strings = npt.NDArray[np.bytes_]

FEW_SHARDS, COARSE_STRIDE = 8, 4
"""With more than FEW_SHARDS shards, every fourth length is searched first, then the lengths between the longest of
these that matches and the next one."""


@dataclass(frozen=True)
class Matches:
    """The longest matches of the end of a text, and where their continuations begin."""

    length: int  # number of matching tokens; 0: none
    starts: Ints  # [matches], positions of the tokens after each match


@dataclass(frozen=True)
class _Found:
    """Range of matching suffixes in the suffix array of each shard with matches."""

    length: int  # number of matching tokens
    shards: Ints  # indices of the shards with matches
    first: Ints  # [shards], indices into `Datastore._order`
    end: Ints  # [shards], exclusive


NO_MATCHES = Matches(0, np.empty(0, np.int64))


class Datastore:
    """An open datastore, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.header: Header = read_header(path)
        header = self.header
        self._file = np.memmap(path, np.uint8, "r")
        self._ids: npt.NDArray[np.unsignedinteger] = np.ndarray(
            (header.tokens,), f">u{header.id_bytes}", self._file.data, HEADER_BYTES
        )
        # View, as byte strings: element i has the `header.depth` ids that begin at position i.
        self._suffixes: Strings = np.ndarray(
            (header.tokens,),
            f"S{header.depth * header.id_bytes}",
            self._file.data,
            HEADER_BYTES,
            (header.id_bytes,),
        )
        # The suffix arrays of all shards, one after another.
        self._order: npt.NDArray[np.uint32] = np.ndarray(
            (header.tokens,), "<u4", self._file.data, header.order_start
        )
        self._shard_starts = np.arange(0, header.tokens, header.shard_tokens, dtype=np.int64)
        self._shard_ends = np.minimum(self._shard_starts + header.shard_tokens, header.tokens)

    def close(self) -> None:
        empty = np.empty(0, np.uint8)
        self._ids, self._suffixes, self._order, self._file = empty, empty, empty, empty  # type: ignore[assignment]

    def longest_matches(self, text: npt.NDArray[np.int64], shortest: int, most: int) -> Matches:
        """Return up to `most` matches, evenly chosen, of the longest end of `text` that occurs in the datastore.

        Only ends of `shortest` to `header.depth` tokens are searched.
        """
        longest = min(len(text), self.header.depth)
        lengths = np.arange(shortest, longest + 1)
        if not len(lengths) or text[-longest:].max() >= self.header.separator:
            return NO_MATCHES
        shards = np.arange(len(self._shard_starts))
        stride = 1 if len(shards) <= FEW_SHARDS else COARSE_STRIDE
        found = self._longest(text[-longest:], lengths[::stride], shards)
        if found is None:
            return NO_MATCHES
        finer = lengths[(lengths > found.length) & (lengths < found.length + stride)]
        if len(finer):
            found = self._longest(text[-longest:], finer, self._around(found.shards, stride)) or found
        slots = _spread(found.first, found.end, most)
        return Matches(found.length, self._order[slots].astype(np.int64) + found.length)

    def _around(self, shards: Ints, stride: int) -> Ints:
        """Return the shards that may hold matches up to `stride` - 1 tokens longer than those in `shards`.

        Such a match ends at the same token, so it begins up to `stride` - 1 tokens earlier.
        """
        earlier = -(-(stride - 1) // self.header.shard_tokens)
        return np.unique(np.maximum(shards[:, None] - np.arange(earlier + 1), 0))

    def _longest(self, text: npt.NDArray[np.int64], lengths: Ints, shards: Ints) -> "_Found | None":
        """Return the matches, in these shards, of the longest of these ends of the text; None: no end occurs."""
        first, end = self._ranges(text, lengths, shards)
        occurs = first < end  # [lengths, shards]
        found_lengths = np.flatnonzero(occurs.any(axis=1))
        if not len(found_lengths):
            return None
        row = found_lengths[-1]
        matching = occurs[row]
        return _Found(int(lengths[row]), shards[matching], first[row][matching], end[row][matching])

    def continuations(self, starts: Ints, length: int) -> Ints:
        """Return the `length` tokens from each start on, [starts, length]; -1 from the end of the stored text on."""
        positions = np.minimum(starts[:, None] + np.arange(length), self.header.tokens - 1)
        ids = self._ids[positions].astype(np.int64)
        ended = np.logical_or.accumulate(ids == self.header.separator, axis=1)
        return np.where(ended, -1, ids)

    def _ranges(self, text: npt.NDArray[np.int64], lengths: Ints, shards: Ints) -> tuple[Ints, Ints]:
        """Return start and end (exclusive) of the suffixes that begin with the text's last tokens, for each length.

        Both are indices into `_order`, [lengths, shards]. Each lane of the arrays below is a bisection for the start or
        the end of one length's range in one shard.
        """
        bounds = self._bounds(text, lengths)  # [2 * lengths]
        wanted = np.repeat(bounds, len(shards))
        finds_end = np.repeat(np.arange(len(bounds)) >= len(lengths), len(shards))
        low = np.tile(self._shard_starts[shards], len(bounds))
        high = np.tile(self._shard_ends[shards], len(bounds))
        while (open_lanes := low < high).any():
            middle = np.minimum((low + high) // 2, self.header.tokens - 1)  # finished lanes may be at the end
            suffixes = self._suffixes[self._order[middle]]
            comes_before = np.where(finds_end, suffixes <= wanted, suffixes < wanted)
            low = np.where(open_lanes & comes_before, middle + 1, low)
            high = np.where(open_lanes & ~comes_before, middle, high)
        first, end = low.reshape(2, len(lengths), len(shards))
        return first, end

    def _bounds(self, text: npt.NDArray[np.int64], lengths: Ints) -> Strings:
        """Return the smallest and the largest byte string that begin with the text's last tokens, for each length.

        The result is [2 * lengths]: first all smallest, then all largest.
        """
        size = self._suffixes.dtype.itemsize
        data = text.astype(f">u{self.header.id_bytes}").tobytes()
        ends = [data[len(data) - length * self.header.id_bytes :] for length in lengths.tolist()]
        padded = [end.ljust(size, b"\0") for end in ends] + [end.ljust(size, b"\xff") for end in ends]
        return np.array(padded, self._suffixes.dtype)


def _spread(first: Ints, end: Ints, most: int) -> Ints:
    """Return up to `most` numbers of the ranges `first` .. `end` (exclusive), evenly spaced."""
    counts = end - first
    total = int(counts.sum())
    # `taken` are indices into the concatenated ranges; `numbers` are the numbers at these indices.
    taken = np.arange(min(total, most)) * total // min(total, most)
    ends = np.cumsum(counts)
    range_index = np.searchsorted(ends, taken, side="right")
    range_start = ends[range_index] - counts[range_index]
    numbers: Ints = first[range_index] + taken - range_start
    return numbers
