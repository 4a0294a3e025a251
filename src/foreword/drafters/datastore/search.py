"""Finds occurrences of the last tokens of a text in a datastore, and the tokens that follow each occurrence.

Each shard of a datastore has a suffix array: the positions of its tokens, sorted by the ids from each position on. One
vectorised bisection searches all shards for the last n tokens, for all n at once. Interpreter overhead therefore does
not grow with the number of shards or of lengths. Suffixes are compared as byte strings, which sort like the ids.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreword.drafters.datastore.format import HEADER_BYTES, Header, read_header

Ints = npt.NDArray[np.int64]
Strings = npt.NDArray[np.bytes_]

FEW_SHARDS, COARSE_STRIDE = 8, 4
"""With more than FEW_SHARDS shards, every fourth length is searched first. Then the lengths between the longest match
and the next of these lengths are searched."""


@dataclass(frozen=True)
class Matches:
    """The longest matches of the end of a text, and where their continuations begin."""

    length: int  # number of matching tokens; 0: none
    starts: Ints  # [matches], positions of the tokens after each match


@dataclass(frozen=True)
class _MatchRanges:
    """The range of matching suffixes in the suffix array of each shard with matches."""

    length: int  # number of matching tokens
    shards: Ints  # indices of the shards with matches
    first: Ints  # [shards with matches], indices into `Datastore._order`
    end: Ints  # [shards with matches], exclusive


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
        """Drop all arrays on the file, which keep its memory mapping open."""
        empty = np.empty(0, np.uint8)
        self._ids, self._suffixes, self._order, self._file = empty, empty, empty, empty  # type: ignore[assignment]

    def longest_matches(self, text: npt.NDArray[np.int64], shortest: int, most: int) -> Matches:
        """Return up to `most` occurrences, evenly chosen, of the last n tokens of `text`, for the largest n with any.

        n is at least `shortest` and at most `header.depth`.
        """
        longest = min(len(text), self.header.depth)
        lengths = np.arange(shortest, longest + 1)
        if not len(lengths) or text[-longest:].max() >= self.header.separator:
            return NO_MATCHES
        shards = np.arange(len(self._shard_starts))
        stride = 1 if len(shards) <= FEW_SHARDS else COARSE_STRIDE
        matches = self._longest(text[-longest:], lengths[::stride], shards)
        if matches is None:
            return NO_MATCHES
        skipped = lengths[(lengths > matches.length) & (lengths < matches.length + stride)]
        if len(skipped):
            matches = self._longest(text[-longest:], skipped, self._around(matches.shards, stride)) or matches
        slots = _spread(matches.first, matches.end, most)
        return Matches(matches.length, self._order[slots].astype(np.int64) + matches.length)

    def _around(self, shards: Ints, stride: int) -> Ints:
        """Return the shards that may hold matches up to `stride` - 1 tokens longer than those in `shards`.

        Such a match ends at the same token, so it begins up to `stride` - 1 tokens earlier.
        """
        earlier = -(-(stride - 1) // self.header.shard_tokens)
        return np.unique(np.maximum(shards[:, None] - np.arange(earlier + 1), 0))

    def _longest(self, text: npt.NDArray[np.int64], lengths: Ints, shards: Ints) -> _MatchRanges | None:
        """Return the matches in these shards of the last n tokens, for the largest n of `lengths` that has any."""
        first, end = self._ranges(text, lengths, shards)
        occurs = first < end  # [lengths, shards]
        rows = np.flatnonzero(occurs.any(axis=1))  # indices of the lengths with a match
        if not len(rows):
            return None
        row = rows[-1]
        has_match = occurs[row]  # [shards]
        return _MatchRanges(int(lengths[row]), shards[has_match], first[row][has_match], end[row][has_match])

    def continuations(self, starts: Ints, length: int) -> Ints:
        """Return the `length` tokens from each start on, [starts, length]; -1 from the end of the stored text on."""
        positions = np.minimum(starts[:, None] + np.arange(length), self.header.tokens - 1)
        ids = self._ids[positions].astype(np.int64)
        ended = np.logical_or.accumulate(ids == self.header.separator, axis=1)
        return np.where(ended, -1, ids)

    def _ranges(self, text: npt.NDArray[np.int64], lengths: Ints, shards: Ints) -> tuple[Ints, Ints]:
        """Return first and end (exclusive) of the suffixes that begin with the text's last n tokens, for each length n.

        Both are indices into `_order`, [lengths, shards]. Each element (lane) of the arrays below is one bisection: for
        the first or the end of one length's range in one shard.
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
        """Return the smallest and the largest byte string that begin with the text's last n tokens, for each length n.

        The result is [2 * lengths]: first all smallest strings, then all largest.
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
    # Indices into the concatenation of all ranges, then the range of each index and the range's first index.
    indices = np.arange(min(total, most)) * total // min(total, most)
    ends = np.cumsum(counts)
    range_of = np.searchsorted(ends, indices, side="right")
    range_start = ends[range_of] - counts[range_of]
    numbers: Ints = first[range_of] + indices - range_start
    return numbers
