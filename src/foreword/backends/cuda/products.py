"""Selects the fastest implementation of a matrix product by number of rows, among those with the same bits."""

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from foreword.backends.cuda.kernels.linear import Tile, linear
from foreword.backends.cuda.kernels.tall import TallTile, can_be_tall, tall_linear
from foreword.backends.cuda.layout import DECODE_ROWS, PROMPT_STEP
from foreword.backends.cuda.packed_products import WIDE, Matrix, PackedProducts, Rows, part_alignment

_log = logging.getLogger(__name__)

REFERENCE_TILE = Tile(rows=16, columns=32, depth=128)
"""Tile whose bits all other tiles, and cuBLAS, must reproduce."""

ENOUGH_COLUMNS = 8192
"""Columns times parts from which on a product occupies all multiprocessors."""

MOST_PARTS = 4
"""Maximum parts of K; each is written and read again."""

LEAST_PART = 1024
"""Minimum depth of a part of K; splitting further gains nothing."""

ALIGNED = 16
"""Parts begin at multiples of this, for wide loads."""

LIBRARY_FROM, LIBRARY_FROM_WIDE = 64, 96
"""Rows from which on cuBLAS is faster than the kernels: for narrow weights, for wide ones."""

LEAST_CHECKED = 1 << 20
"""Minimum size of a weight to check cuBLAS with: products of small ones can agree by chance."""

LARGEST_CHECKED = 4096
"""Maximum rows for which cuBLAS is checked; larger passes do not use it."""


_LIBRARY_ADDS_PARTS = hasattr(torch.ops.aten.addmm, "dtype_out")
"""Whether cuBLAS can accumulate parts (torch 2.8 and later); prompts are slow otherwise."""


@dataclass
class Products:
    """Matrix products of one model: kernels for few rows, cuBLAS where its summation order is the same."""

    least_part: int = LEAST_PART  # of K
    # Row counts for which cuBLAS is used, by (N, K, depth of a part)
    _library_sizes: dict[tuple[int, int, int], frozenset[int]] = field(default_factory=dict)
    _packed: PackedProducts = field(default_factory=PackedProducts)

    def __call__(self, rows: Rows | Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        """Return input [rows, K] times weight [N, K], + bias: [rows, N]."""
        x = rows.numbers if isinstance(rows, Rows) else rows
        depth, out_shape = x.shape[1], (len(x), len(weight))
        if not isinstance(weight, Tensor):
            return self._packed(rows, weight, bias, x.new_empty(out_shape), depth)
        if self._uses_library(x, weight, depth):
            return functional.linear(x, weight, bias)
        tall = tall_for(len(x), len(weight)) if bias is None else None
        if tall is not None and can_be_tall(x, weight, tall, depth):
            return tall_linear(x, weight, x.new_empty(out_shape), tall)
        return linear(x, weight, bias, x.new_empty(out_shape), tile_for(len(x), len(weight), depth))

    def part_depth(self, weight: Matrix) -> int:
        """Return the depth of a part of K, which depends only on the weight's shape; K itself: no parts."""
        columns, depth = weight.shape
        aligned = ALIGNED if isinstance(weight, Tensor) else part_alignment(weight)
        if isinstance(weight, Tensor) and not _LIBRARY_ADDS_PARTS:
            return depth
        parts = MOST_PARTS
        while parts > 1 and (
            columns * parts > ENOUGH_COLUMNS or depth % (parts * aligned) or depth // parts < self.least_part
        ):
            parts //= 2
        return depth // parts

    def splits(self, weight: Matrix) -> bool:
        """Whether products with these weights may come in parts."""
        return self.part_depth(weight) < weight.shape[1]

    def parts(self, input_rows: Rows | Tensor, weight: Matrix) -> Tensor:
        """Return input [rows, K] times a weight [N, K] that `splits`: float32 [parts, rows, N], to be added in order.

        Few columns do not occupy a GPU, and splitting columns further would read the input more often. So K is split,
        in the same way for every number of rows. If cuBLAS has already added the parts, there is one.
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

    def _uses_library(self, x: Tensor, weight: Tensor, depth: int) -> bool:
        return len(x) in self._library_sizes.get((*weight.shape, depth), ())

    def compute_some(self, whole: list[Matrix], in_parts: list[Matrix]) -> None:
        """Launch the products that `check_library` compares with."""
        for weight in whole:
            if not isinstance(weight, Tensor):
                self._packed.compute_some(weight, weight.shape[1])
            else:
                x = weight[:1].contiguous()
                linear(x, weight, None, x.new_empty((1, len(weight))), REFERENCE_TILE)
        for weight in in_parts:
            depth = self.part_depth(weight)
            if not isinstance(weight, Tensor):
                self._packed.compute_some(weight, depth)
            else:
                x = weight[:1].contiguous()
                parts = x.new_empty((x.shape[1] // depth, 1, len(weight)), dtype=torch.float32)
                linear(x, weight, None, parts, REFERENCE_TILE, depth)

    def check_library(self, whole: list[Matrix], in_parts: list[Matrix]) -> None:
        """Find the sizes for which cuBLAS gives the kernels' bits on this GPU."""
        depths = [(weight, weight.shape[1]) for weight in whole]
        depths += [(weight, self.part_depth(weight)) for weight in in_parts]
        for weight, depth in depths:
            if not isinstance(weight, Tensor):
                self._packed.check(weight, depth)
                continue
            shape = (weight.shape[0], weight.shape[1], depth)
            if shape not in self._library_sizes and weight.numel() >= LEAST_CHECKED:
                self._library_sizes[shape] = _equal_sizes(weight, depth)
                _log.debug("products with %s: library for rows %s", shape, sorted(self._library_sizes[shape]))


def tile_for(rows: int, columns: int, depth: int) -> Tile:
    """Return the fastest tile on an H200 by rows, weight [columns, depth]: see `foreword bench gpu --tiles 8`."""
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
    """Return the fastest tall tile; None where other kernels are faster."""
    if not 64 < rows <= DECODE_ROWS[-1]:
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


def _equal_sizes(weight: Tensor, depth: int) -> frozenset[int]:
    """Return the row counts for which cuBLAS equals the reference tile in every bit."""
    generator = torch.Generator(weight.device).manual_seed(0)
    columns, whole = weight.shape
    sizes = list(range(2 * PROMPT_STEP, LARGEST_CHECKED + 1, PROMPT_STEP))
    if depth == whole:  # for few rows the kernels are faster in parts
        least = LIBRARY_FROM_WIDE if columns >= WIDE else LIBRARY_FROM
        sizes += [rows for rows in DECODE_ROWS if rows >= least and not _beats_library(rows, columns)]
    x = torch.randn((max(sizes), whole), generator=generator, device=weight.device).to(weight.dtype)
    if depth == whole:
        expected = linear(x, weight, None, x.new_empty((len(x), columns)), REFERENCE_TILE)
        return frozenset(
            rows for rows in sizes if torch.equal(functional.linear(x[:rows], weight), expected[:rows])
        )
    parts = torch.empty((whole // depth, len(x), columns), dtype=torch.float32, device=x.device)
    expected = added_up(linear(x, weight, None, parts, REFERENCE_TILE, depth))
    return frozenset(
        rows for rows in sizes if torch.equal(library_sum(x[:rows], weight, depth), expected[:rows])
    )


def added_up(parts: Tensor) -> Tensor:
    """Add the parts of a product in order, into the first of them."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
