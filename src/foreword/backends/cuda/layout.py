"""Layout of a pass on the device: padded sizes, so that few graphs are captured, and rows in tiles."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreword.backends.batch import MASK_WORDS, BatchSizes, ForwardBatch, Ints, Tap
from foreword.backends.cuda.kernels.attention import PART
from foreword.backends.interface import DecodeSize

DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of passes that are captured."""

LOADED_ROWS = 48
"""Maximum rows of passes that launch only our own kernels; once these are loaded, capture needs no first run."""

PROMPT_STEP = 256
"""Larger passes are padded to multiples of this many rows; matrix products are checked for each size."""

FEW_TILES = 2
"""Maximum tiles of passes with few text sizes: idle programs cost them nothing."""

FEW_PARTS = (4, 16)
"""Padded part counts of short texts in such passes; longer ones are padded to powers of two."""

PRODUCT_ROWS = (16, 32, 64, 96, 128, 192, 256)
"""Row counts up to which products have different kernels: `products.tile_for`, `products.tall_for`."""

PREPARED_LENGTHS = (PART // 2, *(3 * PART * parts // 4 for parts in (2, 4, 8, 16)))
"""Text lengths to prepare, one per common number of parts; the steps of a start stay within the same parts."""

NARROW_LINES, NARROW_DIM = 64, 256
"""Maximum lines (rows times heads of a group) of a tile whose positions are split into parts, and the maximum head
dimension for that many."""

ENOUGH_PROGRAMS = 128
"""Tiles times KV heads from which on one program per tile loops over all positions."""

WIDE_LINES, WIDE_DIM = 128, 128
"""Lines of a tile whose program loops over all positions, for head dimensions up to this; fewer for larger ones."""


@dataclass(frozen=True)
class PassShape:
    """Key of a captured pass: everything that is fixed at capture. Passes of one shape differ only in their arrays."""

    rows: int
    logit_rows: int
    hidden_rows: int
    pages: int  # of a block table
    parts: int  # of the longest text of a narrow tile, a power of two; 0: none
    narrow_tiles: int
    narrow_rows: int  # of a tile
    wide_tiles: int
    wide_rows: int  # of a tile
    splits: bool  # whether the parts of a narrow tile's text have separate programs
    has_trees: bool
    has_adapters: bool
    taps: tuple[Tap, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    @property
    def is_decode(self) -> bool:
        """Return whether the pass is small enough to be captured."""
        return self.rows <= DECODE_ROWS[-1] and not self.wide_tiles

    @property
    def kind(self) -> "PassShape":
        """The part of the shape that decides which kernels are launched; text lengths do not."""
        return replace(self, pages=0, parts=0, wide_tiles=min(1, self.wide_tiles))

    def sizes(self, batch: BatchSizes) -> BatchSizes:
        """Return the padded sizes of a batch's arrays; moves of KV rows are not part of the shape."""
        return BatchSizes(
            self.rows, self.rows, self.pages, self.logit_rows, batch.kv_copies, self.hidden_rows
        )


@dataclass(frozen=True)
class Tiles:
    """Tiles of rows, each of one request; arrays are int32 [tiles]."""

    first_rows: Ints
    counts: Ints
    requests: Ints


@dataclass(frozen=True)
class Layout:
    """A pass's shape and tiles, computed on the host."""

    shape: PassShape
    requests: Ints  # [rows], index of the row's request
    adapters: Ints  # [rows], slot of its adapter, 0: none; empty if no row has one
    narrow: Tiles
    wide: Tiles

    @staticmethod
    def of(
        batch: ForwardBatch, page_size: int, group: int, kv_heads: int, head_dim: int = WIDE_DIM
    ) -> "Layout":
        """`group` is how many query heads share a KV head."""
        arrays = batch.arrays
        return _layout(
            arrays.row_starts.tobytes(),
            arrays.ancestor_masks.tobytes(),
            tuple([-(-length // PART) for length in arrays.kv_lens.tolist()]),
            (arrays.block_tables.shape[1], len(arrays.logit_rows), len(arrays.hidden_rows)),
            batch.adapters,
            batch.taps,
            (page_size, group, kv_heads, head_dim),
        )


# Consecutive passes often have equal arrays: return the same object, which other caches find by identity.
@lru_cache(maxsize=512)
def _layout(
    row_starts: bytes,
    ancestor_masks: bytes,
    parts_of_texts: tuple[int, ...],
    sizes: tuple[int, int, int],
    adapters: tuple[int, ...],
    taps: tuple[Tap, ...],
    model: tuple[int, int, int, int],
) -> Layout:
    """Lay out a pass from the values that its shape depends on."""
    (table_pages, logit_rows, hidden_rows), (page_size, group, kv_heads, head_dim) = sizes, model
    cut = _cut(row_starts, ancestor_masks, group, head_dim)
    rows, of_texts = padded_rows(len(cut.requests)), np.array(parts_of_texts, np.int32)[cut.is_narrow]
    most, narrow_tiles = int(of_texts.max(initial=0)), len(cut.narrow.counts)
    if len(cut.wide.counts):
        parts = power_of_two(most)
        pages = max(power_of_two(table_pages), parts * PART // page_size)
    else:  # parts determine pages, so that few shapes occur
        parts = rounded_parts(max(most, -(-table_pages * page_size // PART)), narrow_tiles)
        pages = parts * PART // page_size
    # Texts of similar length keep the GPU busy without splitting: no long text runs alone at the end.
    is_even = 2 * int(of_texts.sum()) >= most * len(of_texts)
    shape = PassShape(
        rows=rows,
        logit_rows=min(rows, padded_rows(logit_rows)),
        hidden_rows=padded_rows(hidden_rows) if hidden_rows else 0,
        pages=pages,
        parts=parts,
        narrow_tiles=min(rows, padded_rows(narrow_tiles)) if narrow_tiles else 0,
        narrow_rows=cut.narrow_rows,
        wide_tiles=len(cut.wide.counts),
        wide_rows=cut.wide_rows,
        splits=narrow_tiles * kv_heads < ENOUGH_PROGRAMS or not is_even,
        has_trees=cut.has_trees,
        has_adapters=any(adapters),
        taps=tuple(dict.fromkeys(taps)),
    )
    slots = np.array(adapters if shape.has_adapters else (), np.int32)
    return Layout(shape, cut.requests, slots[cut.requests] if len(slots) else slots, cut.narrow, cut.wide)


class _Cut(NamedTuple):
    """The rows of a pass in tiles."""

    requests: Ints  # [rows], index of the row's request
    is_narrow: NDArray[np.bool_]  # [requests]
    narrow_rows: int  # of a tile
    narrow: Tiles
    wide_rows: int  # of a tile
    wide: Tiles
    has_trees: bool


@lru_cache(maxsize=512)
def _cut(row_starts: bytes, ancestor_masks: bytes, group: int, head_dim: int) -> _Cut:
    """Cut rows into tiles; cached by the bytes of the two arrays, which seldom change from pass to pass."""
    bounds = np.frombuffer(row_starts, np.int32)
    masks = np.frombuffer(ancestor_masks, np.uint64).reshape(-1, MASK_WORDS)
    starts, counts = bounds[:-1], np.diff(bounds)
    requests = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    narrow_lines = NARROW_LINES * NARROW_DIM // max(NARROW_DIM, head_dim)
    most_narrow = 1 << (max(1, narrow_lines // group).bit_length() - 1)
    # Draft tokens are always in narrow tiles, since they may branch.
    drafted = np.bincount(requests, weights=masks.any(axis=1), minlength=len(counts))
    is_wide = (counts > most_narrow) & (drafted == 0)
    narrow_rows = min(power_of_two(int(counts[~is_wide].max(initial=1))), most_narrow)
    wide_rows = max(1, WIDE_LINES * WIDE_DIM // max(WIDE_DIM, head_dim) // group)
    return _Cut(
        requests,
        ~is_wide,
        narrow_rows,
        _tiles(np.flatnonzero(~is_wide), starts, counts, narrow_rows),
        wide_rows,
        _tiles(np.flatnonzero(is_wide), starts, counts, wide_rows),
        bool((masks & (masks + np.uint64(1))).any()),
    )


def _tiles(requests: NDArray[np.intp], starts: Ints, counts: Ints, rows: int) -> Tiles:
    """Return the rows of some requests in tiles of at most `rows`."""
    of_request = -(-counts[requests] // rows)
    owner = np.repeat(requests, of_request).astype(np.int32)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(of_request) - of_request, of_request)
    first = number * rows
    return Tiles(
        (starts[owner] + first).astype(np.int32),
        np.minimum(counts[owner] - first, rows).astype(np.int32),
        owner,
    )


def decode_sizes(requests: int, length: int, rows: int, kv_heads: int = 1) -> list[DecodeSize]:
    """Return one size per shape of captured passes with `rows` rows per request; short texts first."""
    largest: dict[tuple[int, int], int] = {}
    for count in range(1, min(requests, DECODE_ROWS[-1] // rows) + 1):
        largest[padded_rows(count), padded_rows(count * rows)] = count
    shapes: dict[tuple[int, int], DecodeSize] = {}
    for known in (known for known in PREPARED_LENGTHS if known < length):
        for count in largest.values():
            kernels = 2 * padded_rows(count * rows, PRODUCT_ROWS) + (count * kv_heads >= ENOUGH_PROGRAMS)
            parts = rounded_parts(-(-known // PART), count)
            shapes.setdefault((count, parts), DecodeSize(count, known, kernels))
    return list(shapes.values())


def rounded_parts(parts: int, tiles: int) -> int:
    """Return the number of parts that a captured pass is sized for."""
    if tiles <= FEW_TILES:
        return next((few for few in FEW_PARTS if parts <= few), power_of_two(parts))
    return power_of_two(parts)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def padded_rows(count: int, sizes: Sequence[int] = DECODE_ROWS) -> int:
    """Return the padded number of rows of a pass over `count` rows."""
    for size in sizes:
        if count <= size:
            return size
    return -(-count // PROMPT_STEP) * PROMPT_STEP
