"""Online softmax of a tile's lines over one part of the positions, and the merge of two parts."""

import triton
import triton.language as tl

from foreword.backends.cuda.kernels.functions import tanh


@triton.jit
def _follow(
    q, more_q, keys_at, values_at, more_keys, seen, peak, mass, total, ones, scale, cap,
    EXTRA: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Extend a softmax by positions: q [lines, dim], keys and values of `_rows_at`, seen [lines, positions]."""
    scores = tl.dot(q, keys_at, input_precision=PRECISION)
    if EXTRA > 0:
        scores = tl.dot(more_q, more_keys, scores, input_precision=PRECISION)
    scores *= scale
    if CAPPED:
        scores = tanh(scores) * cap
    scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    ground = tl.where(higher == -float("inf"), 0.0, higher)
    fade = tl.exp2(peak - ground)
    weights = tl.exp2(scores - ground[:, None]).to(values_at.dtype)
    mass = tl.dot(weights, ones, mass * fade[:, None], input_precision=PRECISION)
    total = tl.dot(weights, values_at, total * fade[:, None], input_precision=PRECISION)
    return higher, mass, total


@triton.jit
def merge(peak, mass, total, peak2, mass2, total2) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merge two softmaxes over different positions: peaks and masses [lines], totals [lines, dim]."""
    higher = tl.maximum(peak, peak2)
    ground = tl.where(higher == -float("inf"), 0.0, higher)
    fade, fade2 = tl.exp2(peak - ground), tl.exp2(peak2 - ground)
    # An explicit fma, so that the compiler does not choose which product is rounded.
    mass = tl.fma(mass, fade, mass2 * fade2)
    total = tl.fma(total, tl.broadcast_to(fade[:, None], total.shape), total2 * fade2[:, None])
    return higher, mass, total


@triton.jit
def sink(at) -> tl.tensor:
    """Return the peak of a softmax over an attention sink alone; its mass is 1."""
    return tl.load(at).to(tl.float32) * 1.4426950408889634


@triton.jit
def _rows_at(
    keys, values, slot, there, kv_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, EXTRA: tl.constexpr, EXTRA_BLOCK: tl.constexpr,
):  # fmt: skip
    """Load keys [dim, positions] and values [positions, dim] of these slots, both before either is used.

    The third are a latent row's other numbers [extra, positions].
    """
    dim = tl.arange(0, DIM_BLOCK)
    if EXTRA > 0:
        more, row = tl.arange(0, EXTRA_BLOCK), keys + slot * (DIM + EXTRA)
        v = tl.load(row[:, None] + dim[None, :], mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
        k = tl.trans(v)
        at = row[None, :] + DIM + more[:, None]
        extra = tl.load(at, mask=there[None, :] & (more < EXTRA)[:, None], other=0.0)
    else:
        at = (slot[None, :] * KV_HEADS + kv_head) * DIM + dim[:, None]
        k = tl.load(keys + at, mask=there[None, :] & (dim < DIM)[:, None], other=0.0)
        at = (slot[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
        v = tl.load(values + at, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
        extra = k
    return k, v, extra


@triton.jit
def more_of(line_at, q, real, EXTRA: tl.constexpr, EXTRA_BLOCK: tl.constexpr) -> tl.tensor:
    """Load the EXTRA numbers of queries over latent rows; without EXTRA, return a value that is not read."""
    found = q
    if EXTRA > 0:
        more = tl.arange(0, EXTRA_BLOCK)
        there = real[:, None] & (more < EXTRA)[None, :]
        found = tl.load(line_at[:, None] + more[None, :], mask=there, other=0.0)
    return found


@triton.jit
def _step(
    position, is_mixed, q, more_q, line_row, lengths, prefixes, first_row, least, most, tile_size, peak, mass, total,
    keys, values, table, ancestors, kv_head, scale, cap, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, EXTRA: tl.constexpr, EXTRA_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, NODES: tl.constexpr, STEP: tl.constexpr, TREES: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Extend the softmax of all lines by positions of a part; `is_mixed`: rows may have different keys (trees)."""
    ones = tl.full((STEP, 16), 1.0, dtype=keys.dtype.element_ty)
    page = tl.load(table + position // PAGE, mask=position < most, other=0)
    slot = (page * PAGE + position % PAGE).to(tl.int64)
    if TREES and is_mixed:
        # Rows of a tree have different keys at the same position: process them one by one.
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
            if WINDOWED:
                there = there & (position >= length - window)
            k, v, extra = _rows_at(
                keys, values, own, there, kv_head, KV_HEADS, DIM, DIM_BLOCK, EXTRA, EXTRA_BLOCK
            )
            seen = mine[:, None] & there[None, :]
            peak, mass, total = _follow(
                q, more_q, k, v, extra, seen, peak, mass, total, ones, scale, cap, EXTRA, CAPPED, PRECISION
            )
    else:
        there = (position >= least) & (position < most)
        k, v, extra = _rows_at(
            keys, values, slot, there, kv_head, KV_HEADS, DIM, DIM_BLOCK, EXTRA, EXTRA_BLOCK
        )
        seen = there[None, :] & (position[None, :] < lengths[:, None])
        if WINDOWED:
            seen = seen & (position[None, :] >= (lengths - window)[:, None])
        peak, mass, total = _follow(
            q, more_q, k, v, extra, seen, peak, mass, total, ones, scale, cap, EXTRA, CAPPED, PRECISION
        )
    return peak, mass, total


@triton.jit
def over_part(
    part, q, more_q, line_row, lengths, prefixes, first_row, least, most, least_prefix, tile_size,
    keys, values, table, ancestors, kv_head, scale, cap, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, EXTRA: tl.constexpr, EXTRA_BLOCK: tl.constexpr,
    LINES: tl.constexpr, PAGE: tl.constexpr, NODES: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, TREES: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The softmax of all lines over one part: peak [LINES], mass [LINES], total [LINES, DIM_BLOCK]."""
    peak = tl.full((LINES,), -float("inf"), dtype=tl.float32)
    mass = tl.zeros((LINES, 16), dtype=tl.float32)
    total = tl.zeros((LINES, DIM_BLOCK), dtype=tl.float32)
    is_mixed = (part + 1) * PART > least_prefix
    first = part * PART + tl.arange(0, STEP)
    if STEP == PART:
        peak, mass, total = _step(
            first, is_mixed, q, more_q, line_row, lengths, prefixes, first_row, least, most, tile_size, peak,
            mass, total, keys, values, table, ancestors, kv_head, scale, cap, window, KV_HEADS, DIM, DIM_BLOCK, EXTRA,
            EXTRA_BLOCK, PAGE, NODES, STEP, TREES, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
    else:
        for step in range(0, PART, STEP):
            peak, mass, total = _step(
                first + step, is_mixed, q, more_q, line_row, lengths, prefixes, first_row, least, most, tile_size,
                peak, mass, total, keys, values, table, ancestors, kv_head, scale, cap, window, KV_HEADS, DIM,
                DIM_BLOCK, EXTRA, EXTRA_BLOCK, PAGE, NODES, STEP, TREES, WINDOWED, CAPPED, PRECISION,
            )  # fmt: skip
    return peak, tl.max(mass, axis=1), total
