"""Products with weights in 8 bits: which tile for how many rows, among those that give the same bits."""

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.backends.cuda.kernels.fp8 import FP8, LARGEST, LEAST, Fp8Rows, Fp8Weight, fp8_linear, round_rows
from foreword.backends.cuda.kernels.linear import Tile
from foreword.backends.cuda.layout import DECODE_ROWS

_log = logging.getLogger(__name__)

Matrix = Tensor | Fp8Weight
"""Weights of a product."""

REFERENCE_TILE = Tile(rows=16, columns=64, depth=128)
"""What every other tile must equal, bit by bit."""

_PIECE = 1 << 24
"""Numbers of a matrix that are held in float32 while it is rounded."""


class Rows(NamedTuple):
    """The input of products: its numbers, and the same in 8 bits where the weights are."""

    numbers: Tensor  # [rows, K]
    rounded: Fp8Rows | None = None

    @staticmethod
    def room(like: Tensor, width: int, weight: Matrix) -> "Rows":
        """Memory for as many rows as `like` has, which products with such weights read."""
        numbers = like.new_empty((len(like), width))
        if isinstance(weight, Tensor):
            return Rows(numbers)
        return Rows(numbers, Fp8Rows.room(like, width, weight.in_blocks))


def rounded_weight(weight: Tensor) -> Fp8Weight:
    """Round a matrix [N, K] to 8 bits with a scale for every row."""
    largest = weight.abs().amax(1, keepdim=True).float().clamp(min=LEAST.value)
    values = torch.empty_like(weight, dtype=FP8)
    step = max(1, _PIECE // weight.shape[1])
    for some in range(0, len(weight), step):
        rows = slice(some, some + step)
        values[rows] = (weight[rows].float() * (LARGEST.value / largest[rows])).to(FP8)
    return Fp8Weight(values, largest / LARGEST.value)


@dataclass
class Fp8Products:
    """Matrix products with weights in 8 bits."""

    _odd: set[tuple[tuple[int, int], int, Tile]] = field(default_factory=set)  # tiles with other bits
    _checked: set[tuple[tuple[int, int], int]] = field(default_factory=set)

    def __call__(
        self, x: Rows | Tensor, weight: Fp8Weight, bias: Tensor | None, out: Tensor, depth: int
    ) -> Tensor:
        """x [rows, K] times weight [N, K], + bias, into `out`: [rows, N] or, in parts of `depth`, [parts, rows, N]."""
        tile = tile_for(out.shape[-2], len(weight))
        if ((*weight.shape,), depth, tile) in self._odd:
            tile = REFERENCE_TILE
        return fp8_linear(_rounded(x, weight), weight, bias, out, tile, depth)

    def check(self, weight: Fp8Weight, depth: int) -> None:
        """Find out which tiles give the bits of the reference on this GPU; the others are not used."""
        shape = (*weight.shape,)
        if (shape, depth) in self._checked:
            return
        self._checked.add((shape, depth))
        generator = torch.Generator(weight.values.device).manual_seed(0)
        x = torch.randn((DECODE_ROWS[-1] + 1, shape[1]), generator=generator, device=weight.values.device)
        rows = _rounded(x.bfloat16(), weight)
        found = [torch.empty((shape[1] // depth, len(x), shape[0]), device=x.device) for _ in range(2)]
        expected = fp8_linear(rows, weight, None, found[0], REFERENCE_TILE, depth)
        for tile in {tile_for(size, shape[0]) for size in (*DECODE_ROWS, DECODE_ROWS[-1] + 1)}:
            if not torch.equal(fp8_linear(rows, weight, None, found[1], tile, depth), expected):
                self._odd.add((shape, depth, tile))
                _log.warning("8-bit products with %s: %s has other bits and is not used", shape, tile)


def _rounded(x: Rows | Tensor, weight: Fp8Weight) -> Fp8Rows:
    numbers, known = x if isinstance(x, Rows) else (x, None)
    if known is not None and known.in_blocks == weight.in_blocks:
        return known
    return round_rows(numbers, Fp8Rows.room(numbers, numbers.shape[1], weight.in_blocks))


def tile_for(rows: int, columns: int) -> Tile:
    """The fastest tile on an H200 for so many rows times weights with so many columns."""
    if rows <= 16:
        return Tile(16, 64, 256, stages=4)
    if rows <= 32:
        return Tile(32, 64, 256, stages=4)
    if rows <= 64:
        return Tile(64, 64, 128, stages=6)
    return Tile(128, 64, 128, stages=4) if rows <= 128 else Tile(128, 128, 128, warps=8)
