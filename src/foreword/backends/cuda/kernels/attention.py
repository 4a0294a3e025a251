"""Attention of any number of rows per request over paged KV: committed prefix, then the ancestors of a draft token.

A row's result is the same bits whatever runs beside it. The positions that it sees are cut into parts of PART
positions, and parts are merged in their order. A key stands in the lane of its position, not of its slot: an ancestor
on another branch of a tree is gathered to where it will be once it is committed. Sums over a part are taken by the
tensor cores, whose order does not depend on how many lines they work on. Two kernels share this: one gives every part
a program of its own and merges afterwards (few requests), the other goes through all parts itself (many, prompts).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.backends.cuda.kernels.ahead import (
    ahead,
    let_the_next_kernel_come,
    wait_for_the_kernel_before,
)
from foreword.backends.cuda.kernels.linear import precision_of
from foreword.kernels.launching import kernel

PART = 128
"""Positions whose keys are looked at together."""

LOG2E = 1.4426950408889634


@triton.jit
def _follow(
    q, keys_at, values_at, seen, peak, mass, total, ones, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """Softmax over more positions: q [lines, dim], keys_at [dim, PART], values_at [PART, dim], seen [lines, PART]."""
    scores = tl.dot(q, keys_at, input_precision=PRECISION) * scale
    scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    ground = tl.where(higher == -float("inf"), 0.0, higher)
    fade = tl.exp2(peak - ground)
    weights = tl.exp2(scores - ground[:, None]).to(values_at.dtype)
    mass = tl.dot(weights, ones, mass * fade[:, None], input_precision=PRECISION)
    total = tl.dot(weights, values_at, total * fade[:, None], input_precision=PRECISION)
    return higher, mass, total


@triton.jit
def _merge(peak, mass, total, peak2, mass2, total2):
    """Two softmaxes over different positions as one: peaks and masses [lines], totals [lines, dim]."""
    higher = tl.maximum(peak, peak2)
    ground = tl.where(higher == -float("inf"), 0.0, higher)
    fade, fade2 = tl.exp2(peak - ground), tl.exp2(peak2 - ground)
    # Spelled out, so that no compiler chooses which of the two products is rounded.
    mass = tl.fma(mass, fade, mass2 * fade2)
    total = tl.fma(total, tl.broadcast_to(fade[:, None], total.shape), total2 * fade2[:, None])
    return higher, mass, total


@triton.jit
def _rows_at(
    keys, values, slot, there, kv_head, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr
):  # fmt: skip
    """Keys [dim, PART] and values [PART, dim] of these slots: both are being loaded before either is used."""
    dim = tl.arange(0, DIM_BLOCK)
    at = (slot[None, :] * KV_HEADS + kv_head) * DIM + dim[:, None]
    k = tl.load(keys + at, mask=there[None, :] & (dim < DIM)[:, None], other=0.0)
    at = (slot[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
    v = tl.load(values + at, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
    return k, v


@triton.jit
def _part(
    part, q, line_row, lengths, prefixes, first_row, least, most, least_prefix, tile_size,
    keys, values, table, ancestors, kv_head, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, LINES: tl.constexpr,
    PAGE: tl.constexpr, NODES: tl.constexpr, PART: tl.constexpr, TREES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax of all lines over one part: peak [LINES], mass [LINES], total [LINES, DIM_BLOCK]."""
    ones = tl.full((PART, 16), 1.0, dtype=keys.dtype.element_ty)
    peak = tl.full((LINES,), -float("inf"), dtype=tl.float32)
    mass = tl.zeros((LINES, 16), dtype=tl.float32)
    total = tl.zeros((LINES, DIM_BLOCK), dtype=tl.float32)
    position = part * PART + tl.arange(0, PART)
    page = tl.load(table + position // PAGE, mask=position < most, other=0)
    slot = (page * PAGE + position % PAGE).to(tl.int64)
    if TREES and (part + 1) * PART > least_prefix:
        # Rows of a tree see different keys at the same position: one row after the other.
        for row in range(tile_size):
            mine = line_row == row
            prefix = tl.max(tl.where(mine, prefixes, 0), axis=0)
            length = tl.max(tl.where(mine, lengths, 0), axis=0)
            guessed = (position >= prefix) & (position < length)
            elsewhere = tl.load(
                ancestors + (first_row + row) * NODES + position - prefix, mask=guessed, other=0
            )
            own = tl.where(guessed, elsewhere.to(tl.int64), slot)
            there = (position >= least) & (position < length)
            k, v = _rows_at(keys, values, own, there, kv_head, KV_HEADS, DIM, DIM_BLOCK)
            seen = mine[:, None] & there[None, :]
            peak, mass, total = _follow(q, k, v, seen, peak, mass, total, ones, scale, PRECISION)
    else:
        there = (position >= least) & (position < most)
        k, v = _rows_at(keys, values, slot, there, kv_head, KV_HEADS, DIM, DIM_BLOCK)
        seen = there[None, :] & (position[None, :] < lengths[:, None])
        peak, mass, total = _follow(q, k, v, seen, peak, mass, total, ones, scale, PRECISION)
    return peak, tl.max(mass, axis=1), total


# Sizes that grow with a text, and tiles of one row, are no reason for kernels of their own.
@kernel(do_not_specialize=("table_width", "num_parts", "tile_size"))
def _attend(
    queries, keys, values, tile_rows, tile_counts, tile_requests, tables, positions, prefix_lens, ancestors, starts,
    out, part_peaks, part_masses, table_width, num_parts, tile_size, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    LINES: tl.constexpr, PAGE: tl.constexpr, NODES: tl.constexpr,
    PART: tl.constexpr, SPLIT: tl.constexpr, TREES: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one request, one KV head; with SPLIT one part of the positions, without it all."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    group: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    count = tl.load(tile_counts + tile)
    if count == 0:
        return
    first_row = tl.load(tile_rows + tile).to(tl.int64)
    request = tl.load(tile_requests + tile).to(tl.int64)
    line = tl.arange(0, LINES)
    line_row = line // group
    real = line_row < count
    row = first_row + line_row
    lengths = tl.load(positions + row, mask=real, other=-1) + 1
    prefixes = tl.load(prefix_lens + row, mask=real, other=0)
    most = tl.max(lengths, axis=0)
    first_part, end_part = 0, tl.cdiv(most, PART)
    if SPLIT:
        first_part = tl.program_id(2)
        if first_part >= end_part:
            return
        end_part = first_part + 1
    least = tl.load(starts + request) if STARTS else 0
    least_prefix = tl.min(tl.where(real, prefixes, 1 << 30), axis=0)
    dim = tl.arange(0, DIM_BLOCK)
    head = kv_head * group + line % group
    query_at = (row[:, None] * HEADS + head[:, None]) * DIM + dim[None, :]
    shown = real[:, None] & (dim < DIM)[None, :]
    q = tl.load(queries + query_at, mask=shown, other=0.0)
    table = tables + request * table_width
    peak = tl.full((LINES,), -float("inf"), dtype=tl.float32)
    mass = tl.zeros((LINES,), dtype=tl.float32)
    total = tl.zeros((LINES, DIM_BLOCK), dtype=tl.float32)
    for part in range(first_part, end_part):
        peak2, mass2, total2 = _part(
            part, q, line_row, lengths, prefixes, first_row, least, most, least_prefix, tile_size,
            keys, values, table, ancestors, kv_head, scale,
            KV_HEADS, DIM, DIM_BLOCK, LINES, PAGE, NODES, PART, TREES, PRECISION,
        )  # fmt: skip
        peak, mass, total = _merge(peak, mass, total, peak2, mass2, total2)
    if SPLIT:
        place = ((tile.to(tl.int64) * tile_size + line_row) * HEADS + head) * num_parts + first_part
        tl.store(part_peaks + place, peak, mask=real)
        tl.store(part_masses + place, mass, mask=real)
        tl.store(out + place[:, None] * DIM + dim[None, :], total, mask=shown)
    else:
        result = tl.div_rn(total, tl.broadcast_to(mass[:, None], total.shape))
        tl.store(out + query_at, result.to(out.dtype.element_ty), mask=shown)


@kernel(do_not_specialize=("num_parts", "tile_size"))
def _merge_parts(
    parts, part_peaks, part_masses, tile_rows, tile_counts, positions, out, num_parts, tile_size,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, HEADS: tl.constexpr, PART: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One head of one row: its parts in the order of their positions."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile, of_tile = place // tile_size, place % tile_size
    if of_tile >= tl.load(tile_counts + tile):
        return
    row = tl.load(tile_rows + tile) + of_tile
    dim = tl.arange(0, DIM_BLOCK)
    there = (dim < DIM)[None, :]
    peak = tl.full((1,), -float("inf"), dtype=tl.float32)
    mass = tl.zeros((1,), dtype=tl.float32)
    total = tl.zeros((1, DIM_BLOCK), dtype=tl.float32)
    one = (place * HEADS + head) * num_parts + tl.arange(0, 1)
    for part in range(0, tl.cdiv(tl.load(positions + row) + 1, PART)):
        total2 = tl.load(parts + (one + part)[:, None] * DIM + dim[None, :], mask=there, other=0.0)
        peak2, mass2 = tl.load(part_peaks + one + part), tl.load(part_masses + one + part)
        peak, mass, total = _merge(peak, mass, total, peak2, mass2, total2)
    result = tl.div_rn(total, tl.broadcast_to(mass[:, None], total.shape))
    target = out + (row * HEADS + head) * DIM + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=there)


@dataclass(frozen=True)
class RowTiles:
    """Rows of one request each, which a program takes together. A tile without rows is left out."""

    first_rows: Tensor  # int32 [tiles]
    counts: Tensor  # int32 [tiles], at most `rows`
    requests: Tensor  # int32 [tiles]
    rows: int  # that a tile has room for


@dataclass(frozen=True)
class Sight:
    """What the rows of a pass see; the same for every layer. Arrays as in `ForwardBatch`, on the device."""

    positions: Tensor
    prefix_lens: Tensor
    block_tables: Tensor
    ancestors: Tensor  # int32 [rows, MAX_DRAFT_NODES], see `ancestor_slots`
    page_size: int
    has_trees: bool  # whether the draft of any request branches
    starts: Tensor | None = None  # int32 [requests], positions before these are not seen; None: all are


@dataclass(frozen=True)
class Workspace:
    """Room for the parts of a split pass, by place of a row in the tiles."""

    totals: Tensor  # float32 [places, heads, parts, dim]
    peaks: Tensor  # float32 [places, heads, parts]
    masses: Tensor  # float32 [places, heads, parts]

    @staticmethod
    def allocate(tiles: RowTiles, heads: int, parts: int, dim: int) -> "Workspace":
        """Room for tiles whose rows see at most parts * PART positions."""
        places, device = len(tiles.counts) * tiles.rows, tiles.counts.device

        def room(*more: int) -> Tensor:
            return torch.empty((places, heads, parts, *more), dtype=torch.float32, device=device)

        return Workspace(room(dim), room(), room())


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sight: Sight,
    tiles: RowTiles,
    out: Tensor,
    workspace: Workspace | None,
) -> Tensor:
    """Softmax attention of the rows of `tiles`: queries [rows, heads, dim] over keys, values [slots, kv heads, dim].

    With a workspace every part of the positions has a program of its own. Rows of no tile stay as they are.
    """
    heads, dim = queries.shape[1:]
    kv_heads = keys.shape[1]
    lines = lines_for(tiles.rows, heads // kv_heads)
    parts = 1 if workspace is None else workspace.peaks.shape[2]
    part_totals, peaks, masses = (
        (out, out, out) if workspace is None else (workspace.totals, workspace.peaks, workspace.masses)
    )
    grid = (len(tiles.counts), kv_heads, parts)
    _attend[grid](
        queries, keys, values, tiles.first_rows, tiles.counts, tiles.requests, sight.block_tables, sight.positions,
        sight.prefix_lens, sight.ancestors, sight.positions if sight.starts is None else sight.starts,
        part_totals, peaks, masses, sight.block_tables.shape[1], parts, tiles.rows,
        dim**-0.5 * LOG2E,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim),
        LINES=lines, PAGE=sight.page_size, NODES=MAX_DRAFT_NODES, PART=PART,
        SPLIT=workspace is not None, TREES=sight.has_trees, STARTS=sight.starts is not None,
        PRECISION=precision_of(queries),
        num_warps=4 if lines <= 64 else 8, num_stages=1 if workspace is not None else 2, **ahead(queries),
    )  # fmt: skip
    if workspace is not None:
        _merge_parts[(len(tiles.counts) * tiles.rows, heads)](
            part_totals, peaks, masses, tiles.first_rows, tiles.counts, sight.positions, out, parts, tiles.rows,
            DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), HEADS=heads, PART=PART,
            num_warps=1, **ahead(queries),
        )  # fmt: skip
    return out


def lines_for(rows: int, group: int) -> int:
    """Lines of a tile with `rows` rows of `group` heads: a power of two, as the tensor cores want it."""
    return max(16, triton.next_power_of_2(rows * group))
