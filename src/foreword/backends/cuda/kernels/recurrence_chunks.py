"""Recurrences over prompts: all that does not depend on the state is computed for all chunks at once.

Only the updates of the rows and the states depend on the chunk before. So there are three kernels, which compute the
factors between the rows of a chunk, then updates and states chunk by chunk, then the outputs. They sum in the order of
`recurrence`, so that a row has the bits that it has in decoding.

A *segment* is a request's part of one chunk. Its rows have *lanes* 0 .. 63, in 4 blocks (BLOCKS) of 16 lanes (LANES):
first the rows that the ring has already (`ring_count`), then the pass's own (`count`). `decays` are sums of log decays
from the start of the chunk.
"""

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.backends.cuda.kernels.dependent_launch import fetch_to_cache
from foreword.backends.cuda.kernels.linear import precision_of
from foreword.backends.cuda.kernels.recurrence import (
    LANES,
    WARPS,
    RingRows,
    Segments,
    decayed,
    row_tile,
    store_updates,
    times_state,
    without_row,
)
from foreword.backends.cuda.kernels.recurrence_factors import BLOCKS, block_rows, factors
from foreword.kernels.launching import kernel

VALUES_OF_UPDATES, VALUES_OF_OUTPUTS = 32, 64
"""Columns of a head's values that one program of each kernel computes."""


@triton.jit
def _inputs(
    block: tl.constexpr, first_row, count, ring_count, ring, head, key_head, d, key_mask, v, mask, keys, values, decays,
    strengths, ring_keys, ring_updates, ring_decays, ring_to,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return a block's keys, decays, strengths, values, updates that the ring has, and ring rows to write."""
    k, g, strength = block_rows(
        block, first_row, count, ring_count, ring, head, key_head, d, key_mask, keys, decays, strengths, ring_keys,
        ring_decays, HEADS, KEY_HEADS, KEYS, LANES,
    )  # fmt: skip
    lane = block * LANES + tl.arange(0, LANES)
    is_known, is_own = lane < ring_count, (lane >= ring_count) & (lane < ring_count + count)
    at = (first_row + lane - ring_count).to(tl.int64)
    value_at = values + (at * HEADS + head)[:, None] * VALUES + v[None, :]
    value = tl.load(value_at, mask=is_own[:, None] & mask[None, :], other=0.0)
    ring_at = ring_updates + ((ring + lane) * HEADS + head)[:, None] * VALUES + v[None, :]
    known = tl.load(ring_at, mask=is_known[:, None] & mask[None, :], other=0.0)
    return k, g, strength, value, known, tl.load(ring_to + at, mask=is_own, other=-1).to(tl.int64)


@triton.jit
def _updated(
    block: tl.constexpr, predicted, strength, value, known, count, ring_count, system,
    DELTA: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the updates of a block, with those that the ring has.

    With the delta rule, each row is reduced by the updates of the earlier rows of the block times their factors in
    `system` [earlier row, row] (forward substitution, unrolled; the last row has no later ones).
    """
    i = tl.arange(0, LANES)
    lane = block * LANES + i
    is_own = (lane >= ring_count) & (lane < ring_count + count)
    dtype: tl.constexpr = value.dtype
    if DELTA:
        # All factors are loaded before the first is used.
        at = system + block * LANES * LANES + i
        f0, f1, f2 = tl.load(at), tl.load(at + LANES), tl.load(at + 2 * LANES)
        f3, f4, f5 = tl.load(at + 3 * LANES), tl.load(at + 4 * LANES), tl.load(at + 5 * LANES)
        f6, f7, f8 = tl.load(at + 6 * LANES), tl.load(at + 7 * LANES), tl.load(at + 8 * LANES)
        f9, f10, f11 = tl.load(at + 9 * LANES), tl.load(at + 10 * LANES), tl.load(at + 11 * LANES)
        f12, f13, f14 = tl.load(at + 12 * LANES), tl.load(at + 13 * LANES), tl.load(at + 14 * LANES)
    fresh = strength[:, None] * (value.to(tl.float32) - predicted)
    update = tl.where(is_own[:, None], fresh, known.to(tl.float32))
    if DELTA:
        update = without_row(update, i == 0, f0, dtype)
        update = without_row(update, i == 1, f1, dtype)
        update = without_row(update, i == 2, f2, dtype)
        update = without_row(update, i == 3, f3, dtype)
        update = without_row(update, i == 4, f4, dtype)
        update = without_row(update, i == 5, f5, dtype)
        update = without_row(update, i == 6, f6, dtype)
        update = without_row(update, i == 7, f7, dtype)
        update = without_row(update, i == 8, f8, dtype)
        update = without_row(update, i == 9, f9, dtype)
        update = without_row(update, i == 10, f10, dtype)
        update = without_row(update, i == 11, f11, dtype)
        update = without_row(update, i == 12, f12, dtype)
        update = without_row(update, i == 13, f13, dtype)
        update = without_row(update, i == 14, f14, dtype)
    return update.to(dtype)


@triton.jit
def _store_block(
    block: tl.constexpr, stored, ring_row, first_row, count, ring_count, head, v, mask, updates, ring_updates,
    HEADS: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Store the updates of the pass's own rows of a block, also in the ring."""
    lane = block * LANES + tl.arange(0, LANES)
    is_own = (lane >= ring_count) & (lane < ring_count + count)
    at = (first_row + lane - ring_count).to(tl.int64)
    own_mask = is_own[:, None] & mask[None, :]
    store_updates(stored, at, ring_row, head, v, own_mask, updates, ring_updates, HEADS, VALUES)


@triton.jit
def _with_predictions(predicted, scores, block: tl.constexpr, earlier: tl.constexpr, updates, BLOCKS: tl.constexpr,
    LANES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return `predicted` plus what the `updates` of an earlier block predict for the rows of a block."""
    i = tl.arange(0, LANES)
    at = scores + (block * BLOCKS + earlier) * LANES * LANES
    return tl.dot(
        tl.load(at + i[:, None] * LANES + i[None, :]), updates, predicted, input_precision=PRECISION
    )


@triton.jit
def _with_block(state, k, g, u, total, PRECISION: tl.constexpr):
    """Return the state plus the updates `u` of one block, decayed to the end of the chunk (`total`)."""
    decayed_u = (u.to(tl.float32) * tl.exp(total - g)[:, None]).to(k.dtype)
    return tl.dot(tl.trans(k), decayed_u, state, input_precision=PRECISION)


@kernel()
def _update(  # noqa: PLR0915 - the blocks of a chunk are in registers, and so one by one
    keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays, states, systems, scores,
    chunk_states, segment_first, segment_count, segment_ring_count, segment_next_state, segment_ring, request_begin,
    request_end, request_state, ring_to,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUES: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, DELTA: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr,
    FETCHES: tl.constexpr,
):  # fmt: skip
    """Compute updates and states of one request, one head and some of its values, chunk by chunk.

    Of block i: keys k, decays g, strengths b, values x, known updates y, ring rows r, predictions p and updates u.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(request_begin + request), tl.load(request_end + request)
    if begin >= end:
        return
    key_head = head // (HEADS // KEY_HEADS)
    d = tl.arange(0, KEY_BLOCK)
    v = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    key_mask, mask = d < KEYS, v < VALUES
    size: tl.constexpr = HEADS * KEYS * VALUES
    state_offset = (head * KEYS + d)[:, None] * VALUES + v[None, :]
    state_mask = key_mask[:, None] & mask[None, :]
    slot = tl.load(request_state + request).to(tl.int64)
    state = tl.load(states + slot * size + state_offset, mask=state_mask, other=0.0)
    zero = begin.to(tl.int64) * 0  # makes offsets of segments 64-bit
    for segment in range(begin, end):
        first_row, count = tl.load(segment_first + segment), tl.load(segment_count + segment)
        ring_count, ring = tl.load(segment_ring_count + segment), tl.load(segment_ring + segment).to(tl.int64)
        tl.store(chunk_states + (zero + segment) * size + state_offset, state, mask=state_mask)
        k0, g0, b0, x0, y0, r0 = _inputs(
            0, first_row, count, ring_count, ring, head, key_head, d, key_mask, v, mask, keys, values, decays,
            strengths, ring_keys, ring_updates, ring_decays, ring_to, HEADS, KEY_HEADS, KEYS, VALUES, LANES,
        )  # fmt: skip
        k1, g1, b1, x1, y1, r1 = _inputs(
            1, first_row, count, ring_count, ring, head, key_head, d, key_mask, v, mask, keys, values, decays,
            strengths, ring_keys, ring_updates, ring_decays, ring_to, HEADS, KEY_HEADS, KEYS, VALUES, LANES,
        )  # fmt: skip
        k2, g2, b2, x2, y2, r2 = _inputs(
            2, first_row, count, ring_count, ring, head, key_head, d, key_mask, v, mask, keys, values, decays,
            strengths, ring_keys, ring_updates, ring_decays, ring_to, HEADS, KEY_HEADS, KEYS, VALUES, LANES,
        )  # fmt: skip
        k3, g3, b3, x3, y3, r3 = _inputs(
            3, first_row, count, ring_count, ring, head, key_head, d, key_mask, v, mask, keys, values, decays,
            strengths, ring_keys, ring_updates, ring_decays, ring_to, HEADS, KEY_HEADS, KEYS, VALUES, LANES,
        )  # fmt: skip
        if FETCHES and segment + 2 < end:  # the next chunk is whole
            row = (first_row + count + tl.arange(0, BLOCKS * LANES)).to(tl.int64)
            key_at = keys + (row * KEY_HEADS + key_head) * KEYS
            fetch_to_cache(key_at)
            fetch_to_cache(key_at + KEYS // 2)
            fetch_to_cache(values + (row * HEADS + head) * VALUES + tl.program_id(2) * VALUE_BLOCK)
            if DELTA:
                # A cache line has 128 bytes: 2 * LANES numbers of `systems`, BLOCKS * LANES of `scores`.
                next_index, cache_line = (zero + segment + 1) * HEADS + head, tl.arange(0, 2 * LANES)
                fetch_to_cache(systems + (next_index * 2 * LANES + cache_line) * 2 * LANES)
                cache_line = tl.arange(0, BLOCKS * LANES)
                fetch_to_cache(scores + (next_index * BLOCKS * LANES + cache_line) * BLOCKS * LANES)
        p0 = tl.zeros((LANES, VALUE_BLOCK), dtype=tl.float32)
        p1, p2, p3 = p0, p0, p0
        index = (zero + segment) * HEADS + head
        system = systems + index * BLOCKS * LANES * LANES
        score = scores + index * BLOCKS * BLOCKS * LANES * LANES
        if DELTA:
            p0 = decayed(times_state(k0, state, PRECISION), g0)
            p1 = decayed(times_state(k1, state, PRECISION), g1)
            p2 = decayed(times_state(k2, state, PRECISION), g2)
            p3 = decayed(times_state(k3, state, PRECISION), g3)
        u0 = _updated(0, p0, b0, x0, y0, count, ring_count, system, DELTA, LANES)
        if DELTA:
            p1 = _with_predictions(p1, score, 1, 0, u0, BLOCKS, LANES, PRECISION)
            p2 = _with_predictions(p2, score, 2, 0, u0, BLOCKS, LANES, PRECISION)
            p3 = _with_predictions(p3, score, 3, 0, u0, BLOCKS, LANES, PRECISION)
        u1 = _updated(1, p1, b1, x1, y1, count, ring_count, system, DELTA, LANES)
        if DELTA:
            p2 = _with_predictions(p2, score, 2, 1, u1, BLOCKS, LANES, PRECISION)
            p3 = _with_predictions(p3, score, 3, 1, u1, BLOCKS, LANES, PRECISION)
        u2 = _updated(2, p2, b2, x2, y2, count, ring_count, system, DELTA, LANES)
        if DELTA:
            p3 = _with_predictions(p3, score, 3, 2, u2, BLOCKS, LANES, PRECISION)
        u3 = _updated(3, p3, b3, x3, y3, count, ring_count, system, DELTA, LANES)
        _store_block(
            0, u0, r0, first_row, count, ring_count, head, v, mask, updates, ring_updates, HEADS, VALUES, LANES
        )  # fmt: skip
        _store_block(
            1, u1, r1, first_row, count, ring_count, head, v, mask, updates, ring_updates, HEADS, VALUES, LANES
        )  # fmt: skip
        _store_block(
            2, u2, r2, first_row, count, ring_count, head, v, mask, updates, ring_updates, HEADS, VALUES, LANES
        )  # fmt: skip
        _store_block(
            3, u3, r3, first_row, count, ring_count, head, v, mask, updates, ring_updates, HEADS, VALUES, LANES
        )  # fmt: skip
        if segment + 1 < end:  # the chunk is complete: compute the state at the start of the next one
            last = tl.arange(0, LANES) == LANES - 1
            total = tl.sum(tl.where(last, g3, 0.0), axis=0)
            state = state * tl.exp(total)
            state = _with_block(state, k0, g0, u0, total, PRECISION)
            state = _with_block(state, k1, g1, u1, total, PRECISION)
            state = _with_block(state, k2, g2, u2, total, PRECISION)
            state = _with_block(state, k3, g3, u3, total, PRECISION)
            slot = tl.load(segment_next_state + segment).to(tl.int64)
            if slot >= 0:
                tl.store(states + slot * size + state_offset, state, mask=state_mask)


@kernel()
def _outputs(
    queries, keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays, chunk_states, skip, out,
    segment_first, segment_count, segment_ring_count, segment_ring, ring_to,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUES: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, DELTA: tl.constexpr, NODES: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one block, one head and some of its values, from its chunk's state and all updates."""
    segment, block, head = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    first_row, count = tl.load(segment_first + segment), tl.load(segment_count + segment)
    ring_count, ring = tl.load(segment_ring_count + segment), tl.load(segment_ring + segment).to(tl.int64)
    lane = tl.maximum(block * LANES, ring_count)
    end_lane = tl.minimum(block * LANES + LANES, ring_count + count)
    if lane >= end_lane:
        return
    key_head = head // (HEADS // KEY_HEADS)
    d = tl.arange(0, KEY_BLOCK)
    v = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    key_mask, mask = d < KEYS, v < VALUES
    state_at = (
        chunk_states + ((segment.to(tl.int64) * HEADS + head) * KEYS + d)[:, None] * VALUES + v[None, :]
    )
    state = tl.load(state_at, mask=key_mask[:, None] & mask[None, :], other=0.0)
    # No trees: there is no first node, and `ring_to` stands in for the ancestors, which are not read.
    row_tile(
        state, first_row + lane - ring_count, end_lane - lane, first_row, ring_count, 0, ring, head, key_head, d,
        key_mask, v, mask, queries, keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays,
        skip, out, lane, ring_to, ring_to, HEADS, KEY_HEADS, KEYS, VALUES, VALUE_BLOCK, DELTA, TREES=False,
        NODES=NODES, LANES=LANES, PRECISION=PRECISION, UPDATED=True,
    )  # fmt: skip


def recur_chunks(
    parts: tuple[Tensor, Tensor, Tensor],
    strengths: Tensor,
    rows: RingRows,
    ring: RingRows,
    states: Tensor,
    skip: Tensor | None,
    segments: Segments,
    num_segments: int,
    ring_to: Tensor,
    out: Tensor,
) -> Tensor:
    """Compute what `recurrence.recur` does, for rows without branching drafts; `num_segments` is without padding."""
    queries, keys, values = parts
    (_, heads, value_dim), (key_heads, key_dim) = out.shape, keys.shape[1:]
    sizes = {
        "HEADS": heads,
        "KEY_HEADS": key_heads,
        "KEYS": key_dim,
        "KEY_BLOCK": max(16, triton.next_power_of_2(key_dim)),
        "LANES": LANES,
        "PRECISION": precision_of(keys),
        "num_warps": WARPS,
    }
    padded_values = max(16, triton.next_power_of_2(value_dim))
    is_delta = skip is None  # only Mamba-2 has skip factors
    of_segments = segments.firsts, segments.counts, segments.ring_count
    systems, scores = factors(keys, strengths, rows.decays, ring, segments, num_segments, is_delta)
    chunk_states = out.new_empty((num_segments, heads, key_dim, value_dim))
    width = min(VALUES_OF_UPDATES, padded_values)
    _update[(len(segments.begin), heads, triton.cdiv(value_dim, width))](
        keys, values, strengths, rows.decays, rows.updates, ring.keys, ring.updates, ring.decays, states, systems,
        scores, chunk_states, *of_segments, segments.next_state, segments.ring, segments.begin, segments.end,
        segments.state, ring_to, VALUES=value_dim, VALUE_BLOCK=width, DELTA=is_delta, BLOCKS=BLOCKS.value,
        FETCHES=out.is_cuda, num_stages=1,
        **sizes,
    )  # fmt: skip
    width = min(VALUES_OF_OUTPUTS, padded_values)
    _outputs[(num_segments * BLOCKS.value, heads, triton.cdiv(value_dim, width))](
        queries, keys, values, strengths, rows.decays, rows.updates, ring.keys, ring.updates, ring.decays,
        chunk_states, states if skip is None else skip, out, *of_segments, segments.ring, ring_to,
        VALUES=value_dim, VALUE_BLOCK=width, DELTA=is_delta, NODES=MAX_DRAFT_NODES, BLOCKS=BLOCKS.value,
        num_stages=1, **sizes,
    )  # fmt: skip
    return out
