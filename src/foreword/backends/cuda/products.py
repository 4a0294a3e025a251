"""Which way a matrix product is computed for how many rows: the fastest whose rows have the same bits."""

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from foreword.backends.cuda.kernels.linear import Tile, linear
from foreword.backends.cuda.layout import DECODE_ROWS, PROMPT_STEP

_log = logging.getLogger(__name__)

REFERENCE_TILE = Tile(rows=16, columns=32, depth=128)
"""What every other way must equal, bit by bit."""

WIDE = 16_384
"""Columns from which on a product has work for every processor several times over, and needs less of it at a time."""

DEEP = 8192
"""Depth from which on narrow tiles of great depth are best."""

LIBRARY_FROM, LIBRARY_FROM_WIDE = 64, 96
"""Rows from which on the library is faster than the kernels: for narrow weights, for wide ones."""

LARGEST_CHECKED = 4096
"""Rows up to which the library's products are checked; larger passes do not use it."""


@dataclass
class Products:
    """Matrix products of one model: kernels for few rows, the vendor's library where it adds up in the same order."""

    _library_sizes: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)  # (N, K) -> rows

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [rows, K] times weight [N, K], + bias: [rows, N]."""
        if len(x) in self._library_sizes.get((weight.shape[0], weight.shape[1]), ()):
            return functional.linear(x, weight, bias)
        out = x.new_empty((len(x), len(weight)))
        return linear(x, weight, bias, out, tile_for(len(x), *weight.shape))

    def check_library(self, weights: list[Tensor]) -> None:
        """Find out for which sizes the library gives the same bits as the kernels do, on this GPU."""
        for weight in weights:
            shape = (weight.shape[0], weight.shape[1])
            if shape not in self._library_sizes:
                self._library_sizes[shape] = _equal_sizes(weight)
                _log.debug("products with %s: library for rows %s", shape, sorted(self._library_sizes[shape]))


def tile_for(rows: int, columns: int, depth: int) -> Tile:
    """The fastest tile on an H200 for x [rows, depth] times weight [columns, depth]: `foreword bench gpu --tiles 8`."""
    if rows <= 16:
        return Tile(16, 64, 128, stages=4 if columns >= WIDE else 6, swapped=True)
    if rows <= 32:
        if columns >= WIDE:
            return Tile(32, 64, 128, stages=4, swapped=True)
        return Tile(32, 32, 512) if depth >= DEEP else Tile(32, 64, 128, stages=6, swapped=True)
    if rows <= 64:
        return Tile(64, 128, 128, stages=4) if columns >= WIDE else Tile(64, 32, 256, stages=4)
    if columns >= WIDE:
        return Tile(128, 128, 64, warps=8)
    return Tile(64, 64, 128, stages=6) if rows <= 128 else Tile(128, 64, 64, warps=8, stages=6)


def _equal_sizes(weight: Tensor) -> frozenset[int]:
    """Numbers of rows for which the library's product equals the reference tile's in every bit."""
    generator = torch.Generator(weight.device).manual_seed(0)
    sizes = [
        rows for rows in DECODE_ROWS if rows >= (LIBRARY_FROM_WIDE if len(weight) >= WIDE else LIBRARY_FROM)
    ]
    sizes += range(2 * PROMPT_STEP, LARGEST_CHECKED + 1, PROMPT_STEP)
    x = torch.randn((sizes[-1], weight.shape[1]), generator=generator, device=weight.device).to(weight.dtype)
    expected = linear(x, weight, None, x.new_empty((len(x), len(weight))), REFERENCE_TILE)
    equal = [rows for rows in sizes if torch.equal(functional.linear(x[:rows], weight), expected[:rows])]
    return frozenset(equal)
