"""Times all kernels for the matrix products of a model, to choose the tiles in backends/cuda/products."""

import os
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
from foreword.backends.cuda.kernels.tall import TallTile, can_be_tall, tall_linear
from foreword.backends.cuda.products import REFERENCE_TILE, Products, added_up, library_sum
from foreword.backends.torch.weights import DecoderWeights
from foreword.bench.gpu.device import device_seconds

_COLD_BYTES = 256 << 20  # bytes of weight copies that are read in turns, so that no cache holds them


@dataclass(frozen=True)
class TileTime:
    """Time of one kernel for one product."""

    shape: tuple[int, int]  # [N, K] of the weights
    rows: int
    parts: int  # splits of K
    tile: Tile | TallTile | None  # None: the library's kernel
    microseconds: float
    terabytes: float  # weights read per second
    same_bits: bool  # whether the result has the bits of the reference tile


def candidates(rows: int) -> Iterator[Tile | TallTile]:
    """Yield tiles to try for a product over this many rows."""
    heights = [64, 128] if rows > 64 else [next(size for size in (16, 32, 64) if rows <= size)]
    for height, columns in product(heights, (16, 32, 64, 128)):
        yield from _candidates(height, columns)
    if rows > 64:
        yield from _tall_candidates(rows)


def _candidates(height: int, columns: int) -> Iterator[Tile]:
    """Yield the tiles of this size that keep enough bytes in flight and fit into shared memory."""
    for depth, swapped, stages in product((64, 128, 256, 512), (False, True), (3, 4, 6)):
        loaded_bytes = (height + columns) * depth * 2 * stages
        if 32_000 <= loaded_bytes <= 200_000 and (columns >= 64 or not swapped):
            for warps in (4,) if columns * height < 8192 else (4, 8):
                yield Tile(height, columns, depth, warps, stages, swapped)


def _tall_candidates(rows: int) -> Iterator[TallTile]:
    """Yield the tiles of the smallest height that holds all rows, or of the largest one."""
    pieces = [(64, 32), (128, 0), (128, 64), (128, 128), (256, 0)]  # a tile's rows, in one or two parts
    fitting = min(sum(pair) for pair in pieces if rows <= sum(pair) or pair == (256, 0))
    for height, more in [pair for pair in pieces if sum(pair) == fitting]:
        for columns, depth, stages in product((64, 128, 256), (64, 128), (3, 4, 5, 6, 7, 8)):
            for warps in (4, 8):
                tile = TallTile(height, more, columns, depth, warps, stages)
                if 100_000 <= tile.shared_bytes <= 232_448 and (height + more) * columns <= 6144 * warps:
                    yield tile


def compile_ahead(tiles: Sequence[Tile | TallTile], workers: int) -> None:
    """Fill Triton's cache with several processes, since compiling sequentially takes minutes."""
    parts = [list(tiles[worker::workers]) for worker in range(workers)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, parts))


def _compile(tiles: Sequence[Tile | TallTile]) -> None:
    x = torch.zeros((1, 1024), dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros((1024, 1024), dtype=torch.bfloat16, device="cuda")
    for tile in tiles:
        with suppress(Exception):  # timing reports compile errors
            for rows, kind in product((1, 16), (torch.bfloat16, torch.float32)):
                out = torch.empty((1, rows, 1024), dtype=kind, device="cuda")
                _product(x.expand(rows, -1).contiguous(), weight, out, tile, 1024)


def _product(x: Tensor, weight: Tensor, out: Tensor, tile: Tile | TallTile, part_depth: int) -> Tensor:
    if isinstance(tile, TallTile):
        return tall_linear(x, weight, out, tile, part_depth)
    return linear(x, weight, None, out, tile, part_depth)


def fastest_kernels(weights: DecoderWeights, rows: Sequence[int]) -> list[tuple[str, TileTime]]:
    """Return the three fastest kernels and the library's for each product (by name) and number of rows."""
    layer, products = weights.layers[0], Products()
    matrices = {
        "qkv": (layer.qkv, layer.qkv.shape[1]),
        "output": (layer.output, products.part_depth(layer.output)),
        "gate and up": (layer.gate_up, layer.gate_up.shape[1]),
        "down": (layer.down, products.part_depth(layer.down)),
        "head": (weights.head, weights.head.shape[1]),
    }
    fastest = []
    for count in rows:
        tiles = list(candidates(count))
        compile_ahead(tiles, workers=os.cpu_count() or 1)
        for name, (matrix, part_depth) in matrices.items():
            times = time_products(matrix, part_depth, count, tiles)
            library = next(time for time in times if time.tile is None)
            fastest += [(name, time) for time in (*times[:3], library)]
    return fastest


def time_products(
    weights: Tensor, part_depth: int, rows: int, tiles: Sequence[Tile | TallTile]
) -> list[TileTime]:
    """Return the times of all kernels, fastest first. Of the library alone, adding up the splits of K is included."""
    columns, depth = weights.shape
    copies, parts = max(2, _COLD_BYTES // weights.nbytes), depth // part_depth
    cold = [weights.clone() for _ in range(copies)]
    x = torch.randn((rows, depth), device=weights.device).to(weights.dtype)
    kind = x.dtype if parts == 1 else torch.float32
    out, expected = (torch.empty((parts, rows, columns), dtype=kind, device=x.device) for _ in range(2))
    linear(x, weights, None, expected, REFERENCE_TILE, part_depth)
    expected_sum = added_up(expected.clone())

    def once(weight: Tensor, tile: Tile | TallTile | None) -> Tensor:
        if tile is not None:
            return _product(x, weight, out, tile, part_depth)
        return functional.linear(x, weight) if parts == 1 else library_sum(x, weight, part_depth)

    def timed(tile: Tile | TallTile | None) -> TileTime:
        same = torch.equal(once(weights, tile), expected_sum if tile is None else expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in cold:
                once(weight, tile)
        seconds = device_seconds(graph.replay, repeats=5) / copies
        speed = weights.nbytes / seconds / 1e12
        return TileTime((columns, depth), rows, parts, tile, seconds * 1e6, speed, same)

    times = []
    for tile in (None, *tiles):
        if isinstance(tile, TallTile) and not can_be_tall(x, weights, tile, part_depth):
            continue
        try:
            times.append(timed(tile))
        except Exception as error:  # too large for this GPU's shared memory
            if "out of resource" not in str(error) and "OutOfResources" not in type(error).__name__:
                raise
    return sorted(times, key=lambda time: time.microseconds)
