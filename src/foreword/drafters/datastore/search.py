"""Find where the end of a text occurs in a datastore, and what followed there.

All lengths and shards are searched side by side, one halving at a time: what the interpreter costs does not grow with
them. Texts are compared eight bytes at a time.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreword.drafters.datastore.format import HEADER_BYTES, Header, read_header

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
WORD_BYTES = 8


@dataclass(frozen=True)
class Matches:
    """Places where the end of a text occurs."""

    length: int  # tokens that agree; 0: nowhere
    starts: Ints  # [matches], where what followed begins


NO_MATCHES = Matches(0, np.empty(0, np.int64))


class Datastore:
    """A datastore that is open; the file is mapped, so what is not looked at is not in memory."""

    def __init__(self, path: Path) -> None:
        self.header: Header = read_header(path)
        header = self.header
        self._file = np.memmap(path, np.uint8, "r")
        self._ids: npt.NDArray[np.unsignedinteger] = np.ndarray(
            (header.tokens,), f">u{header.id_bytes}", self._file.data, HEADER_BYTES
        )
        # Eight bytes from every id on: big-endian, so that they are in the order of the ids.
        self._words: Words = np.ndarray(
            (header.tokens + header.depth,), ">u8", self._file.data, HEADER_BYTES, (header.id_bytes,)
        )
        self._order: npt.NDArray[np.uint32] = np.ndarray(
            (header.tokens,), "<u4", self._file.data, header.order_start
        )
        self._shard_starts = np.arange(0, header.tokens, header.shard_tokens, dtype=np.int64)
        self._shard_ends = np.minimum(self._shard_starts + header.shard_tokens, header.tokens)

    def close(self) -> None:
        """Nobody looks anything up any more."""
        empty = np.empty(0, np.uint8)
        self._ids, self._words, self._order, self._file = empty, empty, empty, empty  # type: ignore[assignment]

    def longest_matches(self, text: npt.NDArray[np.int64], shortest: int, most: int) -> Matches:
        """Where the longest end of `text` occurs that occurs at all, evenly chosen if that is more than `most` times.

        Ends of fewer than `shortest` tokens do not count, nor does more of the text than suffixes are sorted by.
        """
        longest = min(len(text), self.header.depth)
        lengths = np.arange(shortest, longest + 1)
        if not len(lengths) or text[-longest:].max() >= self.header.separator:
            return NO_MATCHES
        patterns, masks = self._patterns(text[-longest:], lengths)
        shards = len(self._shard_starts)
        lane_pattern = np.repeat(np.arange(len(lengths)), shards)
        first = self._bound(patterns[lane_pattern], masks[lane_pattern], upper=False)
        found = self._agree(first, patterns[lane_pattern], masks[lane_pattern]).reshape(len(lengths), shards)
        best = np.flatnonzero(found.any(axis=1))
        if not len(best):
            return NO_MATCHES
        chosen = int(best[-1])
        lanes = np.full(shards, chosen)
        last = self._bound(patterns[lanes], masks[lanes], upper=True)
        places = _spread(first.reshape(len(lengths), shards)[chosen], last, most)
        length = int(lengths[chosen])
        return Matches(length, self._order[places].astype(np.int64) + length)

    def continuations(self, starts: Ints, length: int) -> Ints:
        """[starts, length], what follows there; -1 from the end of a text on."""
        places = np.minimum(starts[:, None] + np.arange(length), self.header.tokens - 1)
        ids = self._ids[places].astype(np.int64)
        ended = np.logical_or.accumulate(ids == self.header.separator, axis=1)
        return np.where(ended, -1, ids)

    def _patterns(self, text: npt.NDArray[np.int64], lengths: Ints) -> tuple[Words, Words]:
        """[lengths, words], the ends of the text of these lengths, and which bits of them count."""
        size = self.header.depth * self.header.id_bytes
        patterns, masks = np.zeros((2, len(lengths), size), np.uint8)
        data = np.frombuffer(text.astype(f">u{self.header.id_bytes}").tobytes(), np.uint8)
        for row, length in enumerate(lengths.tolist()):
            used = length * self.header.id_bytes
            patterns[row, :used] = data[len(data) - used :]
            masks[row, :used] = 0xFF
        return patterns.view(">u8").astype(np.uint64), masks.view(">u8").astype(np.uint64)

    def _bound(self, patterns: Words, masks: Words, upper: bool) -> Ints:
        """[lanes], the first place in the order of each shard whose suffix does not come before the pattern.

        With `upper`, the first whose suffix comes behind all that begin with it. Lanes are the shards, over and over.
        """
        repeats = len(patterns) // len(self._shard_starts)
        low, high = np.tile(self._shard_starts, repeats), np.tile(self._shard_ends, repeats)
        while (open_lanes := low < high).any():
            middle = np.minimum((low + high) // 2, self.header.tokens - 1)
            comes_before = self._compare(middle, patterns, masks, upper)
            low = np.where(open_lanes & comes_before, middle + 1, low)
            high = np.where(open_lanes & ~comes_before, middle, high)
        return low

    def _compare(self, places: Ints, patterns: Words, masks: Words, or_equal: bool) -> npt.NDArray[np.bool_]:
        """[lanes], whether the suffix at each place of the order comes before its pattern."""
        words = self._suffix_words(places, patterns.shape[1]) & masks
        comes_before = np.full(len(places), or_equal)
        for word in range(patterns.shape[1] - 1, -1, -1):
            theirs, ours = words[:, word], patterns[:, word]
            comes_before = (theirs < ours) | ((theirs == ours) & comes_before)
        return comes_before

    def _agree(self, places: Ints, patterns: Words, masks: Words) -> npt.NDArray[np.bool_]:
        """[lanes], whether the suffix at a place begins with its pattern."""
        repeats = len(places) // len(self._shard_ends)
        inside = places < np.tile(self._shard_ends, repeats)
        words = self._suffix_words(np.minimum(places, self.header.tokens - 1), patterns.shape[1])
        agree: npt.NDArray[np.bool_] = inside & ((words & masks) == patterns).all(axis=1)
        return agree

    def _suffix_words(self, places: Ints, count: int) -> Words:
        """[lanes, words], the beginnings of the suffixes at these places of the order."""
        starts = self._order[places].astype(np.int64)[:, None]
        per_word = WORD_BYTES // self.header.id_bytes
        words: Words = self._words[starts + np.arange(count) * per_word].astype(np.uint64)
        return words


def _spread(first: Ints, last: Ints, most: int) -> Ints:
    """Places of the ranges first .. last, at most so many, at even distances over all of them."""
    counts = last - first
    total = int(counts.sum())
    taken = np.arange(min(total, most)) * total // min(total, most)
    ends = np.cumsum(counts)
    which = np.searchsorted(ends, taken, side="right")
    places: Ints = first[which] + taken - (ends[which] - counts[which])
    return places
