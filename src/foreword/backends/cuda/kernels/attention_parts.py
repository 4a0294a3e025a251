"""Online softmax of a tile's lines over one part of the positions, and the merge of two parts.

An unfinished softmax has for every line the largest score (peak), the sum of exp2(score - peak) (mass), and the sum of
values with these weights (total): the m, l and acc of FlashAttention. `attention` explains lines, parts, latent and
packed rows.
"""

import triton
import triton.language as tl

from foreword.backends.cuda.kernels.functions import tanh

VALUE_SCALE = tl.constexpr(512.0)
"""Factor of the scales of packed values, so that small weights stay accurate in float16; a power of two is exact."""


@triton.jit
def _halves(pairs, dtype):
    """Widen pairs of 8-bit floats (uint16) to `dtype`: numbers of the first half of a head, and of the second."""
    if dtype == tl.float32:
        first = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
        second = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, $2, 0x3120; mov.b32 {a, b}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second


@triton.jit
def _extend(
    q, extra_q, keys, values, extra_keys, more_values, key_scales, value_scales, visible, is_partial, peak, mass,
    total, more_total, ones, scale, cap,
    EXTRA: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Extend a softmax by positions: q [lines, dim], keys, values and scales as `_load_rows` returns them.

    `visible` [lines, positions] marks the positions to which a line attends. It is read only if `is_partial`. A product
    with `ones` [positions, 16] sums the weights on tensor cores, in the order of the values.
    """
    scores = tl.dot(q, keys, input_precision=PRECISION)
    if EXTRA > 0:
        scores = tl.dot(extra_q, extra_keys, scores, input_precision=PRECISION)
    if PACKED > 0:
        scores *= key_scales[None, :]
    if CAPPED:
        scores = tanh(scores * scale) * cap
        scale = 1.0
    if is_partial:
        scores = tl.where(visible, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    rescale = tl.exp2(peak - base)
    # Scaled and reduced in one instruction, the same one in all kernels.
    factor, offset = tl.full(scores.shape, scale, tl.float32), tl.broadcast_to(-base[:, None], scores.shape)
    weights32 = tl.exp2(tl.fma(scores, factor, offset))
    weights = weights32.to(values.dtype)
    mass = tl.dot(weights, ones, mass * rescale[:, None], input_precision=PRECISION)
    if PACKED > 0:
        weights = (weights32 * (value_scales * VALUE_SCALE)[None, :]).to(values.dtype)
        more_total = tl.dot(weights, more_values, more_total * rescale[:, None], input_precision=PRECISION)
    total = tl.dot(weights, values, total * rescale[:, None], input_precision=PRECISION)
    return new_peak, mass, total, more_total


@triton.jit
def merge(peak, mass, total, peak2, mass2, total2) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merge two softmaxes over different positions: peaks and masses [lines], totals [lines, dim]."""
    new_peak = tl.maximum(peak, peak2)
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    rescale, rescale2 = tl.exp2(peak - base), tl.exp2(peak2 - base)
    # An explicit fma, so that the compiler does not choose which product is rounded.
    mass = tl.fma(mass, rescale, mass2 * rescale2)
    total = tl.fma(total, tl.broadcast_to(rescale[:, None], total.shape), total2 * rescale2[:, None])
    return new_peak, mass, total


@triton.jit
def sink_peak(at) -> tl.tensor:
    """Return the peak of a softmax over an attention sink alone; its mass is 1."""
    return tl.load(at).to(tl.float32) * 1.4426950408889634  # log2(e), as all scores


@triton.jit
def _load_rows(
    keys, values, key_scales, value_scales, slot, mask, kv_head, dtype,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, EXTRA: tl.constexpr, EXTRA_BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Load the keys [dim, positions] and values [positions, dim] of these slots, all before any is used.

    Return keys, values, extra keys, more values, scales of keys and scales of values. In latent rows, extra keys are
    the EXTRA numbers [extra, positions]. In packed rows, keys and values are the first half of a head; extra keys and
    more values are the second half. Results that a kind of row does not have are placeholders.
    """
    dim = tl.arange(0, DIM_BLOCK)
    k_scales, v_scales = slot, slot
    if PACKED > 0:
        at = slot[None, :] * (PACKED // 2) + kv_head * DIM + dim[:, None]
        pairs = tl.load(keys + at, mask=mask[None, :] & (dim < DIM)[:, None], other=0)
        at = slot[:, None] * (PACKED // 2) + kv_head * DIM + dim[None, :]
        value_pairs = tl.load(values + at, mask=mask[:, None] & (dim < DIM)[None, :], other=0)
        # After the numbers of all heads, a row has their scales.
        at = slot * (PACKED // 4) + KV_HEADS * DIM // 2 + kv_head
        k_scales = tl.load(key_scales + at, mask=mask, other=0.0)
        v_scales = tl.load(value_scales + at, mask=mask, other=0.0)
        k, extra = _halves(pairs, dtype)
        v, more_v = _halves(value_pairs, dtype)
    elif EXTRA > 0:
        more, row = tl.arange(0, EXTRA_BLOCK), keys + slot * (DIM + EXTRA)
        v = tl.load(row[:, None] + dim[None, :], mask=mask[:, None] & (dim < DIM)[None, :], other=0.0)
        k = tl.trans(v)
        at = row[None, :] + DIM + more[:, None]
        extra = tl.load(at, mask=mask[None, :] & (more < EXTRA)[:, None], other=0.0)
        more_v = v
    else:
        at = (slot[None, :] * KV_HEADS + kv_head) * DIM + dim[:, None]
        k = tl.load(keys + at, mask=mask[None, :] & (dim < DIM)[:, None], other=0.0)
        at = (slot[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
        v = tl.load(values + at, mask=mask[:, None] & (dim < DIM)[None, :], other=0.0)
        extra, more_v = k, v
    return k, v, extra, more_v, k_scales, v_scales


@triton.jit
def as_product_input(q, PACKED: tl.constexpr) -> tl.tensor:
    """Return queries in the dtype of the products: float16 for packed rows, which widen to it in one instruction."""
    return q.to(tl.float16) if PACKED > 0 and q.dtype == tl.bfloat16 else q


@triton.jit
def store_totals(
    out,
    index,
    dim,
    number_mask,
    total,
    more_total,
    DIM: tl.constexpr,
    EXTRA: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """Store the totals of all lines; for packed rows, also the second half of each head."""
    width: tl.constexpr = DIM + EXTRA if PACKED > 0 else DIM
    at = out + index[:, None] * width + dim[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=number_mask)
    if PACKED > 0:
        tl.store(at + DIM, more_total.to(out.dtype.element_ty), mask=number_mask)


@triton.jit
def load_extra(line_at, q, line_mask, EXTRA: tl.constexpr, EXTRA_BLOCK: tl.constexpr) -> tl.tensor:
    """Load the EXTRA numbers of queries over latent or packed rows; without EXTRA, return a placeholder."""
    extra = q
    if EXTRA > 0:
        more = tl.arange(0, EXTRA_BLOCK)
        mask = line_mask[:, None] & (more < EXTRA)[None, :]
        extra = tl.load(line_at[:, None] + more[None, :], mask=mask, other=0.0).to(q.dtype)
    return extra


@triton.jit
def _step(
    begin, may_have_drafts, q, extra_q, line_row, lengths, prefixes, first_row, first_position, shortest, longest,
    tile_size, peak, mass, total, more_total, keys, values, key_scales, value_scales, table, ancestors, kv_head, scale,
    cap, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, EXTRA: tl.constexpr, EXTRA_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, NODES: tl.constexpr, STEP: tl.constexpr, TREES: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Extend the softmax of all lines by STEP positions from `begin` on; `may_have_drafts`: of the part they are in."""
    ones = tl.full((STEP, 16), 1.0, dtype=q.dtype)
    position = begin + tl.arange(0, STEP)
    page = tl.load(table + position // PAGE, mask=position < longest, other=0)
    slot = (page * PAGE + position % PAGE).to(tl.int64)
    if TREES and may_have_drafts:
        # Rows of a tree have different keys at the same position, so they are processed one by one.
        for row in range(tile_size):
            is_in_row = line_row == row
            prefix = tl.max(tl.where(is_in_row, prefixes, 0), axis=0)
            length = tl.max(tl.where(is_in_row, lengths, 0), axis=0)
            is_draft = (position >= prefix) & (position < length)
            draft_slot = tl.load(
                ancestors + (first_row + row) * NODES + position - prefix, mask=is_draft, other=0
            )
            key_slot = tl.where(is_draft, draft_slot.to(tl.int64), slot)
            mask = (position >= first_position) & (position < length)
            if WINDOWED:
                mask = mask & (position >= length - window)
            k, v, extra, more_v, k_scales, v_scales = _load_rows(
                keys, values, key_scales, value_scales, key_slot, mask, kv_head, q.dtype,
                KV_HEADS, DIM, DIM_BLOCK, EXTRA, EXTRA_BLOCK, PACKED,
            )  # fmt: skip
            visible = is_in_row[:, None] & mask[None, :]
            peak, mass, total, more_total = _extend(
                q, extra_q, k, v, extra, more_v, k_scales, v_scales, visible, True, peak, mass, total, more_total,
                ones, scale, cap, EXTRA, CAPPED, PACKED, PRECISION,
            )  # fmt: skip
    else:
        mask = (position >= first_position) & (position < longest)
        k, v, extra, more_v, k_scales, v_scales = _load_rows(
            keys, values, key_scales, value_scales, slot, mask, kv_head, q.dtype,
            KV_HEADS, DIM, DIM_BLOCK, EXTRA, EXTRA_BLOCK, PACKED,
        )  # fmt: skip
        visible = mask[None, :] & (position[None, :] < lengths[:, None])
        if WINDOWED:
            visible = visible & (position[None, :] >= (lengths - window)[:, None])
        is_partial = WINDOWED or (begin < first_position) | (begin + STEP > shortest)
        peak, mass, total, more_total = _extend(
            q, extra_q, k, v, extra, more_v, k_scales, v_scales, visible, is_partial, peak, mass, total, more_total,
            ones, scale, cap, EXTRA, CAPPED, PACKED, PRECISION,
        )  # fmt: skip
    return peak, mass, total, more_total


@triton.jit
def attend_part(
    part, q, extra_q, line_row, lengths, prefixes, first_row, first_position, shortest, longest, shortest_prefix,
    tile_size, keys, values, key_scales, value_scales, table, ancestors, kv_head, scale, cap, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, EXTRA: tl.constexpr, EXTRA_BLOCK: tl.constexpr,
    LINES: tl.constexpr, PAGE: tl.constexpr, NODES: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, TREES: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return the softmax of all lines over one part: peak [LINES], mass [LINES], total [LINES, DIM_BLOCK].

    The fourth result is the total of the second half of packed heads, else a placeholder.
    """
    peak = tl.full((LINES,), -float("inf"), dtype=tl.float32)
    mass = tl.zeros((LINES, 16), dtype=tl.float32)
    total = tl.zeros((LINES, DIM_BLOCK), dtype=tl.float32)
    more_total = tl.zeros((LINES, DIM_BLOCK if PACKED > 0 else 1), dtype=tl.float32)
    may_have_drafts = (part + 1) * PART > shortest_prefix
    first = part * PART
    if STEP == PART:
        peak, mass, total, more_total = _step(
            first, may_have_drafts, q, extra_q, line_row, lengths, prefixes, first_row, first_position, shortest,
            longest, tile_size, peak, mass, total, more_total, keys, values, key_scales, value_scales, table, ancestors,
            kv_head, scale, cap, window, KV_HEADS, DIM, DIM_BLOCK, EXTRA, EXTRA_BLOCK, PAGE, NODES, STEP, TREES,
            WINDOWED, CAPPED, PACKED, PRECISION,
        )  # fmt: skip
    else:
        for step in range(0, PART, STEP):
            peak, mass, total, more_total = _step(
                first + step, may_have_drafts, q, extra_q, line_row, lengths, prefixes, first_row, first_position,
                shortest, longest, tile_size, peak, mass, total, more_total, keys, values, key_scales, value_scales,
                table, ancestors, kv_head, scale, cap, window, KV_HEADS, DIM, DIM_BLOCK, EXTRA, EXTRA_BLOCK, PAGE,
                NODES, STEP, TREES, WINDOWED, CAPPED, PACKED, PRECISION,
            )  # fmt: skip
    if PACKED > 0:
        total, more_total = total / VALUE_SCALE, more_total / VALUE_SCALE
    return peak, tl.max(mass, axis=1), total, more_total
