"""Selects the fastest implementation of a matrix product by number of rows, among those with the same bits."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foreword.backends.cuda.kernels.linear import Tile, linear
from foreword.backends.cuda.kernels.tall import TallTile, can_be_tall, tall_linear
from foreword.backends.cuda.layout import DECODE_ROWS, PROMPT_STEP
from foreword.backends.cuda.packed_products import (
    WIDE,
    Matrix,
    PackedProducts,
    Rows,
    is_slow,
    kind_of,
    part_alignment,
)

_log = logging.getLogger(__name__)

REFERENCE_TILE = Tile(rows=16, columns=32, depth=128)
"""Tile whose bits all other tiles, and cuBLAS, must reproduce."""

ENOUGH_COLUMNS = 8192
"""Columns times parts of K from which on a product occupies all multiprocessors."""

MOST_PARTS = 4
"""Maximum parts of K. More would cost more than they gain, because each result is written and read again."""

LEAST_PART = 1024
"""Minimum depth of a part of K. Splitting further gains nothing."""

ALIGNED = 16
"""Parts begin at multiples of this many entries, so that loads can be wide."""

LIBRARY_FROM, LIBRARY_FROM_WIDE = 64, 96
"""Rows from which on cuBLAS is faster than the kernels: for narrow weights, for wide ones."""

TALL_ROWS = 256
"""Maximum rows of a tall tile."""

LEAST_CHECKED = 1 << 20
"""Minimum entries of a weight for which cuBLAS is checked: products with smaller ones can agree by chance."""

LARGEST_CHECKED = 4096
"""Maximum rows for which cuBLAS is checked; larger passes do not use it."""


_LIBRARY_ADDS_PARTS = hasattr(torch.ops.aten.addmm, "dtype_out")
"""Whether cuBLAS can add up parts (torch 2.8 and later). Without it, no product is split, or prompts would be slow."""


class Product(NamedTuple):
    """A kind of matrix product that a model computes."""

    weight: Matrix
    bias: Tensor | None = None
    is_split: bool = False  # whether it is computed in parts if `Products.splits` allows that


@dataclass
class Products:
    """Matrix products of one model: kernels for few rows, cuBLAS where its summation order is the same."""

    least_part: int = LEAST_PART  # of K
    # Row counts for which cuBLAS is used, by (N, K, depth of a part, whether it adds a bias)
    _library_sizes: dict[tuple[int, int, int, bool], frozenset[int]] = field(default_factory=dict)
    _packed: PackedProducts = field(default_factory=PackedProducts)

    def __call__(self, rows: Rows | Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        """Return input [rows, K] times weight [N, K], plus bias: [rows, N]."""
        x = rows.numbers if isinstance(rows, Rows) else rows
        depth, out_shape = x.shape[1], (len(x), len(weight))
        if not isinstance(weight, Tensor):
            return self._packed(rows, weight, bias, x.new_empty(out_shape), depth)
        if self._uses_library(x, weight, depth, bias):
            return functional.linear(x, weight, bias)
        tall = tall_for(len(x), len(weight)) if bias is None else None
        if tall is not None and can_be_tall(x, weight, tall, depth):
            return tall_linear(x, weight, x.new_empty(out_shape), tall)
        return linear(x, weight, bias, x.new_empty(out_shape), tile_for(len(x), len(weight), depth))

    def part_depth(self, weight: Matrix) -> int:
        """Return the depth of a part of K, which depends only on the weight; K itself: the product is not split."""
        columns, depth = weight.shape
        aligned = ALIGNED if isinstance(weight, Tensor) else part_alignment(weight)
        if isinstance(weight, Tensor) and not _LIBRARY_ADDS_PARTS:
            return depth
        parts, enough = MOST_PARTS, ENOUGH_COLUMNS
        if not isinstance(weight, Tensor) and is_slow(weight):
            enough *= 2
        while parts > 1 and (
            columns * parts > enough or depth % (parts * aligned) or depth // parts < self.least_part
        ):
            parts //= 2
        return depth // parts

    def splits(self, weight: Matrix) -> bool:
        """Return whether products with this weight may be computed in parts."""
        return self.part_depth(weight) < weight.shape[1]

    def parts(self, input_rows: Rows | Tensor, weight: Matrix) -> Tensor:
        """Return input [rows, K] times a weight [N, K] that `splits`: float32 [parts, rows, N], to be added in order.

        Few columns do not occupy a GPU, and splitting columns further would read the input more often. So K is split,
        in the same way for every number of rows. If cuBLAS has already added the parts, the result has one part.
        """
        x = input_rows.numbers if isinstance(input_rows, Rows) else input_rows
        rows, columns, depth = len(x), len(weight), self.part_depth(weight)
        if isinstance(weight, Tensor) and self._uses_library(x, weight, depth):
            return library_sum(x, weight, depth).unsqueeze(0)
        out = torch.empty((x.shape[1] // depth, rows, columns), dtype=torch.float32, device=x.device)
        if not isinstance(weight, Tensor):
            return self._packed(input_rows, weight, None, out, depth)
        tall = tall_for(rows, columns)
        if tall is not None and can_be_tall(x, weight, tall, depth):
            return tall_linear(x, weight, out, tall, depth)
        return linear(x, weight, None, out, tile_for(rows, columns, depth), depth)

    def _uses_library(self, x: Tensor, weight: Tensor, depth: int, bias: Tensor | None = None) -> bool:
        return len(x) in self._library_sizes.get((*weight.shape, depth, bias is not None), ())

    def compute_some(self, products: Sequence[Product]) -> None:
        """Launch the products that `check_library` compares with."""
        for weight, bias, depth in self._kinds(products):
            if not isinstance(weight, Tensor):
                self._packed.compute_some(weight, depth)
            else:
                _reference(weight[:1].contiguous(), weight, bias, depth)

    def check_library(self, products: Sequence[Product]) -> None:
        """Find the numbers of rows for which cuBLAS gives the kernels' bits on this GPU; `__call__` then uses it."""
        for weight, bias, depth in self._kinds(products):
            if not isinstance(weight, Tensor):
                self._packed.check(weight, depth)
                continue
            kind = (weight.shape[0], weight.shape[1], depth, bias is not None)
            if kind not in self._library_sizes and weight.numel() >= LEAST_CHECKED:
                self._library_sizes[kind] = _equal_sizes(weight, bias, depth)
                _log.debug("products with %s: library for rows %s", kind, sorted(self._library_sizes[kind]))

    def _kinds(self, products: Sequence[Product]) -> Iterator[tuple[Matrix, Tensor | None, int]]:
        """Yield weight, bias and depth of a part of one product of every kind; split products have no bias yet."""
        kinds = set[tuple[int, ...]]()
        for weight, bias, is_split in products:
            depth = self.part_depth(weight) if is_split else weight.shape[1]
            part_bias = bias if depth == weight.shape[1] else None
            if isinstance(weight, Tensor):
                kind: tuple[int, ...] = (*weight.shape, depth, part_bias is not None)
            else:
                kind = kind_of(weight, depth)
            if kind not in kinds:
                kinds.add(kind)
                yield weight, part_bias, depth


def tile_for(rows: int, columns: int, depth: int) -> Tile:
    """Return the fastest tile on an H200 for rows and weight [columns, depth], by `foreword bench gpu --tiles 8`."""
    if rows <= 16:
        if columns >= WIDE:
            return Tile(16, 64, 128, stages=4, swapped=True)
        return (
            Tile(16, 64, 256, stages=4, swapped=True)
            if depth >= 4096
            else Tile(16, 64, 128, stages=6, swapped=True)
        )
    if rows <= 32:
        return Tile(32, 64, 128, stages=4 if columns >= WIDE else 6, swapped=True)
    if rows <= 64:
        return Tile(64, 64, 64, stages=6 if columns >= WIDE else 8, swapped=True)
    if columns >= WIDE:
        return Tile(128, 128, 64, warps=8)
    return Tile(64, 64, 128, stages=6) if rows <= 128 else Tile(128, 64, 64, warps=8, stages=6)


def tall_for(rows: int, columns: int) -> TallTile | None:
    """Return the fastest tall tile on an H200; None: other kernels are faster."""
    if not 64 < rows <= TALL_ROWS:
        return None
    if columns >= WIDE:
        return TallTile(128, 64 if rows > 128 else 0, 256, 64, warps=8) if 96 < rows <= 192 else None
    if rows <= 96:
        return TallTile(64, 32, 64, 128)
    if rows <= 128:
        return TallTile(128, 0, 64, 128)
    return TallTile(128, 64, 64, 64, stages=7) if rows <= 192 else TallTile(128, 128, 64, 64, stages=5)


def _beats_library(rows: int, columns: int) -> bool:
    """Return whether our kernel is faster than cuBLAS for a whole product of this size."""
    return columns >= WIDE and tall_for(rows, columns) is not None


def library_sum(x: Tensor, weight: Tensor, depth: int) -> Tensor:
    """Return the sum of a product's parts, accumulated by cuBLAS: float32 [rows, N]."""
    total = torch.mm(x[:, :depth], weight[:, :depth].T, out_dtype=torch.float32)
    for first in range(depth, x.shape[1], depth):
        k = slice(first, first + depth)
        torch.ops.aten.addmm.dtype_out(total, x[:, k], weight[:, k].T, torch.float32, out=total)
    return total


def _equal_sizes(weight: Tensor, bias: Tensor | None, depth: int) -> frozenset[int]:
    """Return the row counts for which cuBLAS equals the reference tile in every bit."""
    generator = torch.Generator(weight.device).manual_seed(0)
    columns, k_size = weight.shape
    least = LIBRARY_FROM_WIDE if columns >= WIDE else LIBRARY_FROM
    if depth < k_size:  # for few rows the kernels are faster in parts
        least = TALL_ROWS + 1
    sizes = set(range(2 * PROMPT_STEP, LARGEST_CHECKED + 1, PROMPT_STEP))
    sizes |= {rows for rows in DECODE_ROWS if rows >= least and not _beats_library(rows, columns)}
    x = torch.randn((max(sizes), k_size), generator=generator, device=weight.device).to(weight.dtype)
    expected = _reference(x, weight, bias, depth)

    def by_library(rows: Tensor) -> Tensor:
        return functional.linear(rows, weight, bias) if depth == k_size else library_sum(rows, weight, depth)

    return frozenset(rows for rows in sizes if torch.equal(by_library(x[:rows]), expected[:rows]))


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, depth: int) -> Tensor:
    """Return the product by the reference tile, [rows, N]; if K is split, the sum of the parts in float32."""
    shape = (len(x), len(weight))
    if depth == x.shape[1]:
        return linear(x, weight, bias, x.new_empty(shape), REFERENCE_TILE)
    parts = x.new_empty((x.shape[1] // depth, *shape), dtype=torch.float32)
    return added_up(linear(x, weight, None, parts, REFERENCE_TILE, depth))


def added_up(parts: Tensor) -> Tensor:
    """Add the parts of a product in order, in place into the first part, and return it."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
