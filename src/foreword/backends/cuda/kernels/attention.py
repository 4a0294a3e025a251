"""Attention of any number of rows per request over paged KV: committed prefix, then the ancestors of a draft token.

A program computes a tile of lines; a line is one query head of one row. A row has the same bits in any batch, because
its visible positions are split into parts of PART positions that are merged in order. Within a part, keys
are ordered by position, not by slot: the ancestors of a tree node are gathered to the positions that they will have
after a commit. Tensor cores sum over a part in an order that does not depend on the number of lines.

With few requests, every part has its own program, and a second kernel merges the parts. With many requests or prompts,
a program loops over all parts. A sliding window masks positions within a part. Parts that no row of a
tile attends to are skipped, which changes no bit.

A latent row (MLA) has the keys and values of all heads together: DIM numbers that are both key and value, then EXTRA
numbers that only keys have. Latent rows are wide, so a part is processed in steps of fewer positions. Rows packed in
8 bits are processed as two halves of a head, DIM and EXTRA numbers, each with its own total.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.batch import MAX_DRAFT_NODES, SHARE_PART
from foreword.backends.cuda.kernels.attention_parts import (
    as_product_input,
    attend_part,
    load_extra,
    merge,
    sink_peak,
    store_totals,
)
from foreword.backends.cuda.kernels.dependent_launch import begin_kernel, pdl_options
from foreword.backends.cuda.kernels.linear import precision_of
from foreword.backends.cuda.kernels.rotation import numbers_and_scales, packed_bytes
from foreword.kernels.launching import kernel

PART = SHARE_PART
"""Positions per part, whose keys are processed together."""

SHARE_BLOCK = 64
"""Parts whose shares are computed together; fixed, so that no kernel is compiled for longer texts."""

LATENT_STEP = 32
"""Positions of a part whose latent rows are loaded together."""

LATENT_GROUP = 16
"""Maximum query heads of a program over latent rows; they share the loaded rows."""

LOG2_E = 1.4426950408889634
"""Factor of scores, so that exp2, which is one instruction, computes their exp."""


# Not specialised by sizes that grow with a text, nor by the tile size.
@kernel(do_not_specialize=("table_width", "num_parts", "tile_size"))
def _attend(
    queries, keys, values, key_scales, value_scales, tile_rows, tile_counts, tile_requests, tables, positions,
    prefix_lens, ancestors, starts, sinks, out, part_peaks, part_masses, table_width, num_parts, tile_size, scale, cap,
    window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, EXTRA: tl.constexpr,
    EXTRA_BLOCK: tl.constexpr, LINES: tl.constexpr, PAGE: tl.constexpr, NODES: tl.constexpr,
    PART: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr, TREES: tl.constexpr, STARTS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of rows of one request for one KV head: with SPLIT over one part, else over all."""
    begin_kernel(PDL)
    group: tl.constexpr = HEADS // KV_HEADS
    # The last tiles of a prompt have most positions, so they begin first.
    tile, kv_head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    count = tl.load(tile_counts + tile)
    if count == 0:
        return
    first_row, request = tl.load(tile_rows + tile).to(tl.int64), tl.load(tile_requests + tile).to(tl.int64)
    line = tl.arange(0, LINES)
    line_row = line // group
    line_mask = line_row < count
    row = first_row + line_row
    lengths = tl.load(positions + row, mask=line_mask, other=-1) + 1
    prefixes = tl.load(prefix_lens + row, mask=line_mask, other=0)
    longest = tl.max(lengths, axis=0)
    shortest = tl.min(tl.where(line_mask, lengths, 1 << 30), axis=0)
    first_position = tl.load(starts + request) if STARTS else 0
    first_part, end_part = 0, tl.cdiv(longest, PART)
    if WINDOWED:
        first_position = tl.maximum(first_position, shortest - window)
        first_part = first_position // PART
    if SPLIT:
        part_id = tl.program_id(2)
        if (part_id < first_part) | (part_id >= end_part):
            return
        first_part, end_part = part_id, part_id + 1
    shortest_prefix = tl.min(tl.where(line_mask, prefixes, 1 << 30), axis=0)
    dim = tl.arange(0, DIM_BLOCK)
    head = kv_head * group + line % group
    number_mask = line_mask[:, None] & (dim < DIM)[None, :]
    line_at = queries + (row * HEADS + head) * (DIM + EXTRA)
    q = as_product_input(tl.load(line_at[:, None] + dim[None, :], mask=number_mask, other=0.0), PACKED)
    extra_q = load_extra(line_at + DIM, q, line_mask, EXTRA, EXTRA_BLOCK)
    table = tables + request * table_width
    peak, mass = tl.full((LINES,), -float("inf"), dtype=tl.float32), tl.zeros((LINES,), dtype=tl.float32)
    total = tl.zeros((LINES, DIM_BLOCK), dtype=tl.float32)
    second_half_total = tl.zeros((LINES, DIM_BLOCK if PACKED > 0 else 1), dtype=tl.float32)
    if SINKS and not SPLIT:
        peak, mass = sink_peak(sinks + head), mass + 1.0
    for part in range(first_part, end_part):
        peak2, mass2, total2, second_half_total2 = attend_part(
            part, q, extra_q, line_row, lengths, prefixes, first_row, first_position, shortest, longest,
            shortest_prefix, tile_size, keys, values, key_scales, value_scales, table, ancestors, kv_head, scale, cap,
            window,
            KV_HEADS, DIM, DIM_BLOCK, EXTRA, EXTRA_BLOCK, LINES, PAGE, NODES, PART, STEP, TREES, WINDOWED,
            CAPPED, PACKED, PRECISION,
        )  # fmt: skip
        _, _, second_half_total = merge(peak, mass, second_half_total, peak2, mass2, second_half_total2)
        peak, mass, total = merge(peak, mass, total, peak2, mass2, total2)
    if SPLIT:
        index = ((tile.to(tl.int64) * tile_size + line_row) * HEADS + head) * num_parts + first_part
        tl.store(part_peaks + index, peak, mask=line_mask)
        tl.store(part_masses + index, mass, mask=line_mask)
    else:
        index = row * HEADS + head
        total = tl.div_rn(total, tl.broadcast_to(mass[:, None], total.shape))
        second_half_total = tl.div_rn(
            second_half_total, tl.broadcast_to(mass[:, None], second_half_total.shape)
        )
    store_totals(out, index, dim, number_mask, total, second_half_total, DIM, EXTRA, PACKED)


@kernel(do_not_specialize=("num_parts", "tile_size"))
def _merge_parts(
    parts, part_peaks, part_masses, tile_rows, tile_counts, positions, sinks, out, num_parts, tile_size, window,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, HEADS: tl.constexpr, PART: tl.constexpr,
    WINDOWED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts' softmaxes of one head of one row, in order of position."""
    begin_kernel(PDL)
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile, tile_row = index // tile_size, index % tile_size
    if tile_row >= tl.load(tile_counts + tile):
        return
    row = tl.load(tile_rows + tile) + tile_row
    dim = tl.arange(0, DIM_BLOCK)
    mask = (dim < DIM)[None, :]
    peak = tl.full((1,), -float("inf"), dtype=tl.float32)
    mass = tl.zeros((1,), dtype=tl.float32)
    total = tl.zeros((1, DIM_BLOCK), dtype=tl.float32)
    if SINKS:
        peak, mass = sink_peak(sinks + head + tl.arange(0, 1)), mass + 1.0
    first = (index * HEADS + head) * num_parts + tl.arange(0, 1)
    length = tl.load(positions + row) + 1
    first_part = 0
    if WINDOWED:
        first_part = tl.maximum(length - window, 0) // PART
    for part in range(first_part, tl.cdiv(length, PART)):
        total2 = tl.load(parts + (first + part)[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        peak2, mass2 = tl.load(part_peaks + first + part), tl.load(part_masses + first + part)
        peak, mass, total = merge(peak, mass, total, peak2, mass2, total2)
    result = tl.div_rn(total, tl.broadcast_to(mass[:, None], total.shape))
    target = out + (row * HEADS + head) * DIM + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=("num_parts",))
def _add_shares(
    part_peaks, part_masses, positions, shares, num_parts,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Add the parts' shares of the attention of all heads of one row, BLOCK parts at a time."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.cdiv(tl.load(positions + row) + 1, PART)
    for head in range(HEADS):
        first = (row * HEADS + head) * num_parts
        peak, mass = tl.full((1,), -float("inf"), dtype=tl.float32), tl.zeros((1,), dtype=tl.float32)
        for begin in range(0, count, BLOCK):
            part = begin + tl.arange(0, BLOCK)
            peaks = tl.load(part_peaks + first + part, mask=part < count, other=-float("inf"))
            masses = tl.load(part_masses + first + part, mask=part < count, other=0.0)
            new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
            mass = mass * tl.exp2(peak - new_peak) + tl.sum(masses * tl.exp2(peaks - new_peak), axis=0)
            peak = new_peak
        for begin in range(0, count, BLOCK):
            part = begin + tl.arange(0, BLOCK)
            peaks = tl.load(part_peaks + first + part, mask=part < count, other=-float("inf"))
            masses = tl.load(part_masses + first + part, mask=part < count, other=0.0)
            at = shares + row * num_parts + part
            total = tl.load(at, mask=part < count, other=0.0) + masses * tl.exp2(peaks - peak) / mass
            tl.store(at, total, mask=part < count)


@dataclass(frozen=True)
class RowTiles:
    """Tiles of rows; the rows of a tile belong to one request and are processed together. Empty tiles are skipped."""

    first_rows: Tensor  # int32 [tiles]
    counts: Tensor  # int32 [tiles], at most `rows`
    requests: Tensor  # int32 [tiles]
    rows: int  # maximum rows of a tile


@dataclass(frozen=True)
class AttentionMetadata:
    """What rows of a pass attend to, equal for all layers. Arrays are as in `ForwardBatch`, on the device."""

    positions: Tensor  # the index of a row among the KV rows of its request; without gaps, its position
    prefix_lens: Tensor
    block_tables: Tensor
    ancestors: Tensor  # int32 [rows, MAX_DRAFT_NODES], see `ancestor_slots`
    page_size: int
    has_trees: bool = False  # whether the draft of any request branches
    starts: Tensor | None = None  # int32 [requests], first visible position; None: 0
    # float32 [rows, parts], to which layers add what `ForwardOutput.shares` has; then every tile has one row
    shares: Tensor | None = None


@dataclass(frozen=True)
class ScoreRule:
    """A layer's scaling, soft cap, window and attention sinks."""

    scale: float | None = None  # of the scores; None: 1 / sqrt(dim)
    softcap: float | None = None  # bound of scores: softcap * tanh(score / softcap)
    window: int | None = None  # number of newest visible positions; None: all
    sinks: Tensor | None = None  # float32 [heads], attention sinks: scores that belong to no position


PLAIN = ScoreRule()


@dataclass(frozen=True)
class Workspace:
    """Memory for the results of separate parts. The index of a tiled row is tile * rows per tile + row in the tile."""

    totals: Tensor  # float32 [tiled rows, heads, parts, dim]
    peaks: Tensor  # float32 [tiled rows, heads, parts]
    masses: Tensor  # float32 [tiled rows, heads, parts]

    @staticmethod
    def allocate(tiles: RowTiles, heads: int, parts: int, dim: int) -> "Workspace":
        """Allocate memory for tiles whose rows attend to at most parts * PART positions."""
        tiled_rows, device = len(tiles.counts) * tiles.rows, tiles.counts.device

        def room(*more: int) -> Tensor:
            return torch.empty((tiled_rows, heads, parts, *more), dtype=torch.float32, device=device)

        return Workspace(room(dim), room(), room())


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    tiles: RowTiles,
    out: Tensor,
    workspace: Workspace | None,
    rule: ScoreRule = PLAIN,
) -> Tensor:
    """Compute softmax attention of the rows of `tiles` into `out` [rows, heads, dim], and return it.

    | rows | queries | keys | values |
    | --- | --- | --- | --- |
    | usual | [rows, heads, dim] | [slots, kv heads, dim] | [slots, kv heads, dim] |
    | latent (MLA) | [rows, heads, dim + extra] | [slots, 1, dim + extra] | empty |
    | packed (`kernels.rotation`) | [rows, heads, dim] | bytes [slots, kv heads, dim + 4] | as keys |

    With a `workspace`, every part has its own program. Rows outside of all tiles are not written.
    """
    (heads, dim), packed = out.shape[1:], packed_bytes(keys)
    extra = queries.shape[2] - dim
    # Latent rows have one KV head. Each program has a group of query heads, which stands for a KV head here.
    kv_heads = heads // latent_group(heads) if extra else keys.shape[1]
    step = LATENT_STEP if extra else PART
    # Packed heads are loaded as pairs: one number of the first half of a head, one of the second.
    main_dim, extra_dim = (dim // 2, dim // 2) if packed else (dim, extra)
    lines = lines_for(tiles.rows, heads // kv_heads)
    parts = 1 if workspace is None else workspace.peaks.shape[2]
    part_totals, peaks, masses = (
        (out, out, out) if workspace is None else (workspace.totals, workspace.peaks, workspace.masses)
    )
    scale, cap, window = rule.scale or queries.shape[2] ** -0.5, rule.softcap or LOG2_E, rule.window or 0
    # Capped scores are multiplied by LOG2_E after the cap. Without a cap, the kernel does not read `cap`.
    scale = scale * LOG2_E if rule.softcap is None else scale / cap
    grid = (kv_heads, len(tiles.counts), parts)
    stages = 1 if workspace is not None or dim > 128 else 2
    is_large = lines > 64 or lines * dim > 64 * 128  # does not fit into the registers of four warps
    _attend[grid](
        queries, *numbers_and_scales(keys, values, torch.uint16), tiles.first_rows, tiles.counts, tiles.requests,
        metadata.block_tables, metadata.positions, metadata.prefix_lens, metadata.ancestors,
        metadata.positions if metadata.starts is None else metadata.starts,
        queries if rule.sinks is None else rule.sinks,
        part_totals, peaks, masses, metadata.block_tables.shape[1], parts, tiles.rows, scale, cap * LOG2_E, window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=main_dim, DIM_BLOCK=max(16, triton.next_power_of_2(main_dim)),
        EXTRA=extra_dim, EXTRA_BLOCK=max(16, triton.next_power_of_2(extra_dim)), LINES=lines, PAGE=metadata.page_size,
        NODES=MAX_DRAFT_NODES, PART=PART, STEP=step,
        SPLIT=workspace is not None, TREES=metadata.has_trees, STARTS=metadata.starts is not None,
        WINDOWED=rule.window is not None, CAPPED=rule.softcap is not None,
        SINKS=rule.sinks is not None, PACKED=packed, PRECISION=precision_of(queries),
        num_warps=8 if is_large else 4, num_stages=stages, **pdl_options(queries),
    )  # fmt: skip
    if workspace is not None and metadata.shares is not None and rule.window is None:
        _add_shares[(len(tiles.counts),)](
            peaks, masses, metadata.positions, metadata.shares, parts,
            HEADS=heads, BLOCK=SHARE_BLOCK, PART=PART, num_warps=1,
        )  # fmt: skip
    if workspace is not None:
        _merge_parts[(len(tiles.counts) * tiles.rows, heads)](
            part_totals, peaks, masses, tiles.first_rows, tiles.counts, metadata.positions,
            queries if rule.sinks is None else rule.sinks, out, parts, tiles.rows, window,
            DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), HEADS=heads, PART=PART,
            WINDOWED=rule.window is not None, SINKS=rule.sinks is not None, num_warps=1, **pdl_options(queries),
        )  # fmt: skip
    return out


def latent_group(heads: int) -> int:
    """Return the number of latent attention heads per program."""
    return next(group for group in range(min(heads, LATENT_GROUP), 0, -1) if heads % group == 0)


def lines_for(rows: int, group: int) -> int:
    """Return the lines of a tile with `rows` rows of `group` heads, padded to a power of two for tensor cores."""
    return max(16, triton.next_power_of_2(rows * group))
