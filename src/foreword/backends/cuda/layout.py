"""Layout of a pass on the device: its rows are cut into tiles, and sizes are padded so that few graphs are captured."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreword.backends.batch import MASK_WORDS, BatchSizes, ForwardBatch, Ints, Tap
from foreword.backends.cuda.kernels.attention import PART
from foreword.backends.interface import DecodeSize

DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768)
"""Padded numbers of rows of passes that are captured: up to five draft tokens for each of 128 requests."""

PREPARED_ROWS = 256
"""Maximum rows of passes that are captured at the start; larger ones are captured when they occur."""

LOADED_ROWS = 48
"""Maximum rows of passes that launch only our own kernels, so that capture needs no first run once they are loaded."""

PROMPT_STEP = 256
"""Passes with more rows are padded to a multiple of this; matrix products are checked for each such size."""

FEW_TILES = 2
"""Maximum tiles of a pass whose part count is padded to `FEW_PARTS`: so few idle programs cost no time."""

FEW_PARTS = (4, 16)
"""Padded part counts of short texts in such passes. Larger counts are padded to powers of two."""

PRODUCT_ROWS = (16, 32, 64, 96, 128, 192, 256)
"""Maximum rows of each kernel that `products.tile_for` and `products.tall_for` select."""

PREPARED_LENGTHS = (PART // 2, *(3 * PART * parts // 4 for parts in (2, 4, 8, 16)))
"""Text lengths whose passes are prepared at the start, one per common number of parts.

Each is well below the maximum of its number of parts, so that the prepared steps stay within it.
"""

NARROW_LINES, NARROW_DIM = 64, 256
"""Maximum lines (rows times query heads per KV head) of a narrow tile, and the maximum head dimension for that many.

The positions of a narrow tile may be split into parts; the program of a wide tile loops over all positions.
"""

ENOUGH_PROGRAMS = 128
"""Tiles times KV heads from which on parts have no programs of their own: there are enough without."""

WIDE_LINES, WIDE_DIM = 128, 128
"""Lines of a wide tile, and the maximum head dimension for that many; there are fewer for larger heads."""


@dataclass(frozen=True)
class PassShape:
    """Key of a captured pass: everything that is fixed at capture. Passes of one shape differ only in their arrays."""

    rows: int
    logit_rows: int
    hidden_rows: int
    pages: int  # columns of the block table
    parts: int  # padded parts of the longest text of a narrow tile; 0: there are no narrow tiles
    narrow_tiles: int
    narrow_rows: int  # maximum rows of a narrow tile
    wide_tiles: int
    wide_rows: int  # maximum rows of a wide tile
    splits: bool  # whether the parts of a narrow tile's text have separate programs
    has_trees: bool
    has_adapters: bool
    taps: tuple[Tap, ...]
    has_gaps: bool  # whether positions differ from the indices of KV rows
    wants_shares: bool

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
        """Return the shape without text lengths, which do not decide which kernels are launched."""
        return replace(self, pages=0, parts=0, wide_tiles=min(1, self.wide_tiles))

    def sizes(self, batch: BatchSizes) -> BatchSizes:
        """Return the padded sizes of a batch's arrays. Copies of KV rows are not part of the shape."""
        return BatchSizes(
            self.rows, self.rows, self.pages, self.logit_rows, batch.kv_copies, self.hidden_rows
        )


class Tiles(NamedTuple):
    """Tiles of rows, each of one request; arrays are int32 [tiles]."""

    first_rows: Ints
    counts: Ints  # rows
    requests: Ints  # index of the tile's request


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
        """Lay out a batch; `group` is how many query heads share a KV head."""
        arrays = batch.arrays
        cut = arrays.row_starts.tobytes(), arrays.ancestor_masks.tobytes(), group, head_dim
        narrow_parts = -(-arrays.kv_lens // PART)[_cut_into_tiles(*cut).is_narrow]
        max_parts = int(narrow_parts.max(initial=0))
        # The mean length is at least half of the longest. Then the GPU is busy without splitting texts into parts: no
        # long text runs alone at the end.
        is_even = 2 * int(narrow_parts.sum()) >= max_parts * len(narrow_parts)
        sizes = arrays.block_tables.shape[1], len(arrays.logit_rows), len(arrays.hidden_rows)
        return _layout(
            cut,
            max_parts,
            is_even,
            sizes,
            batch.adapters,
            batch.taps,
            (page_size, kv_heads),
            (batch.has_gaps, batch.wants_shares),
        )


# Consecutive passes often differ only in the lengths of texts; they get the same object.
@lru_cache(maxsize=512)
def _layout(
    cut: tuple[bytes, bytes, int, int],
    max_parts: int,
    is_even: bool,
    sizes: tuple[int, int, int],
    adapters: tuple[int, ...],
    taps: tuple[Tap, ...],
    model: tuple[int, int],
    flags: tuple[bool, bool],
) -> Layout:
    """Lay out a pass, given only the values on which its layout depends, so that the result can be cached.

    - `cut`: the arguments of `_cut_into_tiles`.
    - `max_parts`, `is_even`: of texts in narrow tiles, the maximum number of parts, and whether lengths are similar.
    - `sizes`: pages of the block table, logit rows, hidden rows.
    - `model`: page size, KV heads.
    - `flags`: whether the batch has gaps, and whether it wants shares.
    """
    (table_pages, logit_rows, hidden_rows), (page_size, kv_heads) = sizes, model
    has_gaps, wants_shares = flags
    tiling = _cut_into_tiles(*cut)
    rows, narrow_tiles = padded_rows(len(tiling.requests)), len(tiling.narrow.counts)
    if len(tiling.wide.counts):
        parts = power_of_two(max_parts)
        pages = max(power_of_two(table_pages), parts * PART // page_size)
    else:  # the number of parts decides that of pages, so that few shapes occur
        parts = rounded_parts(max(max_parts, -(-table_pages * page_size // PART)), narrow_tiles)
        pages = parts * PART // page_size
    shape = PassShape(
        rows=rows,
        logit_rows=min(rows, padded_rows(logit_rows)),
        hidden_rows=padded_rows(hidden_rows) if hidden_rows else 0,
        pages=pages,
        parts=parts,
        narrow_tiles=min(rows, padded_rows(narrow_tiles)) if narrow_tiles else 0,
        narrow_rows=tiling.narrow_rows,
        wide_tiles=len(tiling.wide.counts),
        wide_rows=tiling.wide_rows,
        splits=narrow_tiles * kv_heads < ENOUGH_PROGRAMS or not is_even or wants_shares,
        has_trees=tiling.has_trees,
        has_adapters=any(adapters),
        taps=tuple(dict.fromkeys(taps)),
        has_gaps=has_gaps,
        wants_shares=wants_shares,
    )
    slots = np.array(adapters if shape.has_adapters else (), np.int32)
    return Layout(
        shape, tiling.requests, slots[tiling.requests] if len(slots) else slots, tiling.narrow, tiling.wide
    )


class _Tiling(NamedTuple):
    """The rows of a pass in tiles."""

    requests: Ints  # [rows], index of the row's request
    is_narrow: NDArray[np.bool_]  # [requests], whether the request's rows are in narrow tiles
    narrow_rows: int  # maximum rows of a narrow tile
    narrow: Tiles
    wide_rows: int  # maximum rows of a wide tile
    wide: Tiles
    has_trees: bool


@lru_cache(maxsize=512)
def _cut_into_tiles(row_starts: bytes, ancestor_masks: bytes, group: int, head_dim: int) -> _Tiling:
    """Cut rows into tiles. Cached by the bytes of the two arrays, which seldom change from pass to pass."""
    bounds = np.frombuffer(row_starts, np.int32)
    masks = np.frombuffer(ancestor_masks, np.uint64).reshape(-1, MASK_WORDS)
    starts, counts = bounds[:-1], np.diff(bounds)
    requests = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    narrow_lines = NARROW_LINES * NARROW_DIM // max(NARROW_DIM, head_dim)  # fewer for larger heads
    most_narrow = 1 << (max(1, narrow_lines // group).bit_length() - 1)  # rounded down to a power of two
    # Draft tokens are always in narrow tiles, since they may branch.
    drafted = np.bincount(requests, weights=masks.any(axis=1), minlength=len(counts))
    is_wide = (counts > most_narrow) & (drafted == 0)
    narrow_rows = min(power_of_two(int(counts[~is_wide].max(initial=1))), most_narrow)
    wide_rows = max(1, WIDE_LINES * WIDE_DIM // max(WIDE_DIM, head_dim) // group)
    # The masks of chains have the form 0..01..1.
    has_trees = bool((masks & (masks + np.uint64(1))).any())
    return _Tiling(
        requests,
        ~is_wide,
        narrow_rows,
        _tiles(np.flatnonzero(~is_wide), starts, counts, narrow_rows),
        wide_rows,
        _tiles(np.flatnonzero(is_wide), starts, counts, wide_rows),
        has_trees,
    )


def _tiles(requests: NDArray[np.intp], starts: Ints, counts: Ints, rows: int) -> Tiles:
    """Cut the rows of some requests into tiles of at most `rows` rows."""
    tiles_of_request = -(-counts[requests] // rows)
    request_of_tile = np.repeat(requests, tiles_of_request).astype(np.int32)
    tile_number = np.arange(len(request_of_tile)) - np.repeat(
        np.cumsum(tiles_of_request) - tiles_of_request, tiles_of_request
    )
    first = tile_number * rows
    return Tiles(
        (starts[request_of_tile] + first).astype(np.int32),
        np.minimum(counts[request_of_tile] - first, rows).astype(np.int32),
        request_of_tile,
    )


def decode_sizes(requests: int, length: int, rows: int, kv_heads: int = 1) -> list[DecodeSize]:
    """Return one size for each shape of passes that are captured at the start, short texts first.

    These have `rows` rows per request.
    """
    largest: dict[tuple[int, int], int] = {}  # by padded requests and padded rows: most requests
    for count in range(1, min(requests, PREPARED_ROWS // rows) + 1):
        largest[padded_rows(count), padded_rows(count * rows)] = count
    shapes: dict[tuple[int, int], DecodeSize] = {}
    for text_length in [prepared for prepared in PREPARED_LENGTHS if prepared < length]:
        for count in largest.values():
            # Kernels differ by the rows of products, and by whether parts have their own programs: one number for both.
            has_enough = count * kv_heads >= ENOUGH_PROGRAMS
            kernels = 2 * padded_rows(count * rows, PRODUCT_ROWS) + int(has_enough)
            parts = rounded_parts(-(-text_length // PART), count)
            shapes.setdefault((count, parts), DecodeSize(count, text_length, kernels))
    return list(shapes.values())


def rounded_parts(parts: int, tiles: int) -> int:
    """Return the padded number of parts of a captured pass."""
    if tiles <= FEW_TILES:
        return next((padded for padded in FEW_PARTS if parts <= padded), power_of_two(parts))
    return power_of_two(parts)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is not less than `count`; 0 for 0."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def padded_rows(count: int, sizes: Sequence[int] = DECODE_ROWS) -> int:
    """Return `count` rounded up to one of `sizes`, or beyond them to a multiple of PROMPT_STEP."""
    for size in sizes:
        if count <= size:
            return size
    return -(-count // PROMPT_STEP) * PROMPT_STEP
