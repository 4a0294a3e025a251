"""Matrix products with packed weights: selects the tile by number of rows, among tiles with the same bits."""

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.backends.cuda.kernels.fp8 import (
    BLOCK,
    FP8,
    LARGEST,
    LEAST,
    Fp8Rows,
    Fp8Weight,
    TmaTile,
    fp8_linear,
    round_rows,
)
from foreword.backends.cuda.kernels.grouped import GroupedWeight, grouped_linear, take_columns
from foreword.backends.cuda.kernels.linear import Tile
from foreword.backends.cuda.layout import DECODE_ROWS

_log = logging.getLogger(__name__)

PackedWeight = Fp8Weight | GroupedWeight
Matrix = Tensor | PackedWeight
"""Weights of a product, [N, K]."""

WIDE = 16_384
"""Columns from which on a product is wide: it has several tiles per multiprocessor, and loads less of K at a time."""

REFERENCE_TILE = Tile(rows=16, columns=64, depth=128)
"""Tile whose bits all other tiles must reproduce."""

_FP8_TILES = {
    16: (Tile(16, 64, 256, stages=4), Tile(16, 64, 128, stages=4)),
    32: (Tile(32, 64, 256, stages=4), Tile(32, 128, 128, warps=8, stages=4)),
    64: (Tile(64, 64, 128, stages=6), TmaTile(64, 128, 128, warps=8, stages=4)),
    128: (TmaTile(64, 64, 128, stages=6), TmaTile(128, 64, 128, stages=4)),
    256: (TmaTile(128, 64, 128, stages=4), TmaTile(128, 128, 128)),
}
"""By maximum rows: the tiles for narrow and for WIDE weights. Tiles of fewer than 16 rows would have other bits."""

_PROMPT_TILE = TmaTile(128, 128, 128)
_GROUPED_TILES = (
    Tile(16, 64, 128, stages=5),
    Tile(32, 64, 128, stages=5),
    Tile(64, 64, 128, stages=4),
    Tile(128, 64, 128, stages=3),
    Tile(128, 128, 128, warps=8),
)
"""The first tile with enough rows is used; the last one for all larger passes."""

_WIDE_GROUPED_TILE = Tile(16, 128, 128)

_PIECE = 1 << 24
"""Numbers that are in float32 at a time while a matrix is rounded."""


class Rows(NamedTuple):
    """Input of products, and the same rounded to 8 bits if the weights are in 8 bits."""

    numbers: Tensor  # [rows, K]
    rounded: Fp8Rows | None = None

    @staticmethod
    def allocate(like: Tensor, width: int, weight: Matrix) -> "Rows":
        """Allocate the input of products with this weight, with as many rows as `like`."""
        numbers = like.new_empty((len(like), width))
        if not isinstance(weight, Fp8Weight):
            return Rows(numbers)
        return Rows(numbers, Fp8Rows.allocate(like, width, weight.in_blocks))


def rounded_weight(weight: Tensor) -> Fp8Weight:
    """Round a matrix [N, K] to 8 bits with a scale for every row."""
    largest = weight.abs().amax(1, keepdim=True).float().clamp(min=LEAST.value)
    values = torch.empty_like(weight, dtype=FP8)
    step = max(1, _PIECE // weight.shape[1])
    for first_row in range(0, len(weight), step):
        rows = slice(first_row, first_row + step)
        values[rows] = (weight[rows].float() * (LARGEST.value / largest[rows])).to(FP8)
    return Fp8Weight(values, largest / LARGEST.value)


@dataclass
class PackedProducts:
    """Matrix products with packed weights."""

    _unusable: set[tuple[tuple[int, ...], Tile]] = field(default_factory=set)  # tiles with other bits
    _checked: set[tuple[int, ...]] = field(default_factory=set)

    def __call__(
        self, x: Rows | Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, depth: int
    ) -> Tensor:
        """Write x times weight, plus bias, to `out`: [rows, N] or, in parts of `depth`, [parts, rows, N]."""
        tile = tile_for(out.shape[-2], weight)
        if self._unusable and (kind_of(weight, depth), tile) in self._unusable:
            tile = REFERENCE_TILE
        return _product(_input(x, weight), weight, bias, out, tile, depth)

    def check(self, weight: PackedWeight, depth: int) -> None:
        """Find tiles with other bits than the reference tile on this GPU, which are then not used."""
        kind = kind_of(weight, depth)
        if kind in self._checked:
            return
        self._checked.add(kind)
        (_, expected), *results = _all_ways(weight, depth)
        for tile, result in results:
            if not torch.equal(result, expected[:, : result.shape[1]]):
                self._unusable.add((kind, tile))
                _log.warning("products with packed weights %s: %s has other bits and is not used", kind, tile)

    def compute_some(self, weight: PackedWeight, depth: int) -> None:
        """Launch the products that `check` compares."""
        if kind_of(weight, depth) not in self._checked:
            _all_ways(weight, depth)


def _all_ways(weight: PackedWeight, depth: int) -> list[tuple[Tile, Tensor]]:
    """Return products of one random input by tile. The reference tile comes first, and has the most rows."""
    device, (columns, k_size) = weight.scales.device, weight.shape
    sizes = (
        *DECODE_ROWS,
        DECODE_ROWS[-1] + 1,
    )  # numbers of rows: those of captured passes, and one of prompts
    x = torch.randn((sizes[-1], k_size), generator=torch.Generator(device).manual_seed(0), device=device)
    numbers = x.bfloat16() if x.is_cuda else x
    tiles = {REFERENCE_TILE: sizes[-1]} | {tile_for(size, weight): size for size in sizes}

    def product(tile: Tile, rows: int) -> Tensor:
        out = torch.empty((k_size // depth, rows, columns), device=device)
        return _product(_input(numbers[:rows], weight), weight, None, out, tile, depth)

    return [(tile, product(tile, rows)) for tile, rows in tiles.items()]


def kind_of(weight: PackedWeight, depth: int) -> tuple[int, ...]:
    """Return everything on which the bits of a product may depend: shape, depth of a part, and format."""
    if isinstance(weight, Fp8Weight):
        return (*weight.shape, depth, weight.in_blocks, 0)
    return (*weight.shape, depth, weight.group, 1 + weight.kind, weight.mins is not None)


def part_alignment(weight: PackedWeight) -> int:
    """Return the number of which the depth of a part of K is a multiple."""
    return BLOCK if isinstance(weight, Fp8Weight) else weight.group


def is_slow(weight: PackedWeight) -> bool:
    """Return whether instructions, not memory, limit a program. Then more programs are faster."""
    return isinstance(weight, GroupedWeight)


def _product(
    x: Fp8Rows | Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, tile: Tile, depth: int
) -> Tensor:
    if isinstance(x, Fp8Rows):
        assert isinstance(weight, Fp8Weight)
        return fp8_linear(x, weight, bias, out, tile, depth)
    assert isinstance(weight, GroupedWeight)
    return grouped_linear(x, weight, bias, out, tile, depth)


def _input(x: Rows | Tensor, weight: PackedWeight) -> Fp8Rows | Tensor:
    """Return the kernel's input: rows in 8 bits, or in the order of the weight's columns."""
    numbers, fp8_rows = x if isinstance(x, Rows) else (x, None)
    if isinstance(weight, GroupedWeight):
        order = weight.order
        return numbers if order is None else take_columns(numbers, order, torch.empty_like(numbers))
    if fp8_rows is not None and fp8_rows.in_blocks == weight.in_blocks:
        return fp8_rows
    return round_rows(numbers, Fp8Rows.allocate(numbers, numbers.shape[1], weight.in_blocks))


def tile_for(rows: int, weight: PackedWeight) -> Tile:
    """Return the fastest tile on an H200 for a number of rows."""
    if isinstance(weight, GroupedWeight):
        if rows <= _WIDE_GROUPED_TILE.rows and len(weight) >= WIDE:
            return _WIDE_GROUPED_TILE
        return next((tile for tile in _GROUPED_TILES if rows <= tile.rows), _GROUPED_TILES[-1])
    for max_rows, (narrow, wide) in _FP8_TILES.items():
        if rows <= max_rows:
            return wide if len(weight) >= WIDE else narrow
    return _PROMPT_TILE
