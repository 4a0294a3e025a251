"""How fast every way of computing a product is, for the shapes of one model: the grounds of backends/cuda/products."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context

import torch
from torch import Tensor
from torch.nn import functional

from foreword.backends.cuda.kernels.linear import Tile, linear
from foreword.backends.cuda.products import REFERENCE_TILE
from foreword.bench.gpu.ceilings import device_seconds

_COLD_BYTES = 256 << 20
"""Weights that are read in turn, so that none is still in the cache."""


@dataclass(frozen=True)
class TileTime:
    """One way of computing one product."""

    shape: tuple[int, int]  # of the weights, [N, K]
    rows: int
    tile: Tile | None  # None: the library
    microseconds: float
    terabytes: float  # a second, of weights
    same_bits: bool  # as the reference tile


def candidates(rows: int) -> Iterator[Tile]:
    """Tiles worth trying for this many rows."""
    least = next((size for size in (16, 32, 64) if rows <= size), 64)
    for height, columns in product((least, 128) if rows > 64 else (least,), (16, 32, 64, 128)):
        yield from _candidates(height, columns)


def _candidates(height: int, columns: int) -> Iterator[Tile]:
    for depth, swapped, stages in product((64, 128, 256, 512), (False, True), (3, 4, 6)):
        loaded = (height + columns) * depth * 2 * stages
        if 32_000 <= loaded <= 200_000 and (columns >= 64 or not swapped):
            for warps in (4,) if columns * height < 8192 else (4, 8):
                yield Tile(height, columns, depth, warps, stages, swapped)


def compile_ahead(tiles: Sequence[Tile], workers: int) -> None:
    """Let several processes fill Triton's cache: compiling one after the other takes minutes."""
    parts = [list(tiles[worker::workers]) for worker in range(workers)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, parts))


def _compile(tiles: Sequence[Tile]) -> None:
    x = torch.zeros((1, 1024), dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros((1024, 1024), dtype=torch.bfloat16, device="cuda")
    for tile in tiles:
        with suppress(Exception):  # what does not compile shows when it is timed
            for rows in (1, 16):
                linear(x.expand(rows, -1).contiguous(), weight, None, x.new_empty((rows, 1024)), tile)


def time_products(weights: Tensor, rows: int, tiles: Sequence[Tile]) -> list[TileTime]:
    """All ways, the fastest first."""
    columns, depth = weights.shape
    copies = max(2, _COLD_BYTES // weights.nbytes)
    cold = [weights.clone() for _ in range(copies)]
    x = torch.randn((rows, depth), device=weights.device).to(weights.dtype)
    out = x.new_empty((rows, columns))
    expected = linear(x, weights, None, x.new_empty((rows, columns)), REFERENCE_TILE)

    def timed(tile: Tile | None) -> TileTime:
        def once(weight: Tensor) -> Tensor:
            if tile is None:
                return functional.linear(x, weight)
            return linear(x, weight, None, out, tile)

        same = torch.equal(once(weights), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in cold:
                once(weight)
        seconds = device_seconds(graph.replay, repeats=5) / copies
        return TileTime((columns, depth), rows, tile, seconds * 1e6, weights.nbytes / seconds / 1e12, same)

    found = []
    for tile in (None, *tiles):
        try:
            found.append(timed(tile))
        except Exception as error:  # too large for this GPU's shared memory: not a way
            if "out of resource" not in str(error) and "OutOfResources" not in type(error).__name__:
                raise
    return sorted(found, key=lambda way: way.microseconds)
