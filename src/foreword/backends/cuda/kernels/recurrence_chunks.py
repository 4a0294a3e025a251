"""Recurrences over prompts: what does not depend on the state is computed for all chunks at once.

Only the updates of the rows and the states depend on the chunk before. So there are three kernels: the factors between
the rows of a chunk; updates and states, chunk by chunk; the outputs. They sum in the order of `recurrence`, so that
a row has the bits that it has in decoding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.backends.cuda.kernels.linear import precision_of
from foreword.backends.cuda.kernels.recurrence import (
    LANES,
    WARPS,
    RingRows,
    Segments,
    load_decays,
    load_numbers,
    row_tile,
    store_updates,
    times_state,
    without_row,
)
from foreword.kernels.launching import kernel
from foreword.kv.chunks import CHUNK

BLOCKS = tl.constexpr(4)
"""Blocks of a chunk."""

VALUES_OF_UPDATES, VALUES_OF_OUTPUTS = 32, 64
"""Values of a head that one program computes."""

assert BLOCKS.value * LANES == CHUNK


@triton.jit
def _block_rows(
    block, first_row, count, ring_count, ring, head, key_head, d, key_mask, keys, decays, strengths, ring_keys,
    ring_decays, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return keys, decays and strengths of the rows of a block; a strength is 0 where the pass has no such row."""
    lane = block * LANES + tl.arange(0, LANES)
    is_known, is_own = lane < ring_count, (lane >= ring_count) & (lane < ring_count + count)
    at = (first_row + lane - ring_count).to(tl.int64)
    k = load_numbers(
        at, ring + lane, keys, ring_keys, is_own, is_known, key_head, d, key_mask, KEY_HEADS, KEYS
    )
    g = load_decays(at, ring + lane, decays, ring_decays, is_own, is_known, head, HEADS)
    return k, g, tl.load(strengths + at * HEADS + head, mask=is_own, other=0.0)


@triton.jit
def _scores(k, g, k2, g2, is_visible, PRECISION: tl.constexpr):
    """Return the decayed products of rows with earlier ones, float32 [rows, earlier rows]."""
    decay = tl.exp(tl.where(is_visible, g[:, None] - g2[None, :], -float("inf")))
    return tl.dot(k, tl.trans(k2), input_precision=PRECISION) * decay


@kernel()
def _factors(
    keys, strengths, decays, ring_keys, ring_decays, systems, scores, segment_first, segment_count,
    segment_ring_count, segment_ring,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute how rows of one segment depend on earlier ones: within blocks (`systems`), and between (`scores`)."""
    segment, head = tl.program_id(0), tl.program_id(1)
    first_row, count = tl.load(segment_first + segment), tl.load(segment_count + segment)
    ring_count, ring = tl.load(segment_ring_count + segment), tl.load(segment_ring + segment).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    d, i = tl.arange(0, KEY_BLOCK), tl.arange(0, LANES)
    index = segment.to(tl.int64) * HEADS + head
    for block in range(0, BLOCKS):
        k, g, strength = _block_rows(
            block, first_row, count, ring_count, ring, head, key_head, d, d < KEYS, keys, decays, strengths,
            ring_keys, ring_decays, HEADS, KEY_HEADS, KEYS, LANES,
        )  # fmt: skip
        lane = block * LANES + i
        is_own = (lane >= ring_count) & (lane < ring_count + count)
        is_path = is_own[:, None] & (i[None, :] <= i[:, None])
        system = _scores(k, g, k, g, is_path, PRECISION) * strength[:, None]
        system = tl.where(i[None, :] < i[:, None], system, 0.0)
        system_at = systems + (index * BLOCKS + block) * LANES * LANES
        tl.store(system_at + i[None, :] * LANES + i[:, None], system)  # one earlier row after the other
        for earlier in range(0, block):
            k2, g2, _ = _block_rows(
                earlier, first_row, count, ring_count, ring, head, key_head, d, d < KEYS, keys, decays, strengths,
                ring_keys, ring_decays, HEADS, KEY_HEADS, KEYS, LANES,
            )  # fmt: skip
            found = _scores(k, g, k2, g2, is_own[:, None], PRECISION).to(keys.dtype.element_ty)
            scores_at = scores + (index * BLOCKS * BLOCKS + block * BLOCKS + earlier) * LANES * LANES
            tl.store(scores_at + i[:, None] * LANES + i[None, :], found)


@triton.jit
def _updated(
    block: tl.constexpr, predicted, strength, first_row, count, ring_count, ring, head, v, mask, values, updates,
    ring_updates, ring_to, system, HEADS: tl.constexpr, VALUES: tl.constexpr, DELTA: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Compute and store the updates of a block; return them, with those that the ring has."""
    i = tl.arange(0, LANES)
    lane = block * LANES + i
    is_known, is_own = lane < ring_count, (lane >= ring_count) & (lane < ring_count + count)
    at = (first_row + lane - ring_count).to(tl.int64)
    store_mask = is_own[:, None] & mask[None, :]
    value = tl.load(values + (at * HEADS + head)[:, None] * VALUES + v[None, :], mask=store_mask, other=0.0)
    ring_at = ring_updates + ((ring + lane) * HEADS + head)[:, None] * VALUES + v[None, :]
    known = tl.load(ring_at, mask=is_known[:, None] & mask[None, :], other=0.0)
    fresh = strength[:, None] * (value.to(tl.float32) - predicted)
    update = tl.where(is_own[:, None], fresh, known.to(tl.float32))
    dtype = values.dtype.element_ty
    if DELTA:
        for step in tl.static_range(LANES - 1):
            factor = tl.load(system + (block * LANES + step) * LANES + i)
            update = without_row(update, i == step, factor, dtype)
    stored = update.to(dtype)
    store_updates(stored, at, is_own, head, v, store_mask, updates, ring_updates, ring_to, HEADS, VALUES)
    return stored


@triton.jit
def _less_block(predicted, scores, block: tl.constexpr, earlier: tl.constexpr, u2, BLOCKS: tl.constexpr,
    LANES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add what the rows of an earlier block predict for the rows of a block."""
    i = tl.arange(0, LANES)
    at = scores + (block * BLOCKS + earlier) * LANES * LANES
    return tl.dot(tl.load(at + i[:, None] * LANES + i[None, :]), u2, predicted, input_precision=PRECISION)


@triton.jit
def _with_block(state, k, g, u, total, PRECISION: tl.constexpr):
    """Add the rows of one block to the state."""
    decay = (u.to(tl.float32) * tl.exp(total - g)[:, None]).to(k.dtype)
    return tl.dot(tl.trans(k), decay, state, input_precision=PRECISION)


@kernel()
def _update(  # noqa: PLR0915 - the blocks of a chunk are in registers, and so one by one
    keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays, states, systems, scores,
    chunk_states, segment_first, segment_count, segment_ring_count, segment_next_state, segment_ring, request_begin,
    request_end, request_state, ring_to,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, DELTA: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute updates and states of one request, one head and some of its values, chunk by chunk."""
    request, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(request_begin + request), tl.load(request_end + request)
    if begin >= end:
        return
    key_head = head // (HEADS // KEY_HEADS)
    d = tl.arange(0, KEY_BLOCK)
    v = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    key_mask, mask = d < KEYS, v < VALUES
    size: tl.constexpr = HEADS * KEYS * VALUES
    state_offset = (head * KEYS + d)[:, None] * VALUES + v[None, :]
    state_mask = key_mask[:, None] & mask[None, :]
    slot = tl.load(request_state + request).to(tl.int64)
    state = tl.load(states + slot * size + state_offset, mask=state_mask, other=0.0)
    zero = begin.to(tl.int64) * 0
    for segment in range(begin, end):
        first_row, count = tl.load(segment_first + segment), tl.load(segment_count + segment)
        ring_count, ring = tl.load(segment_ring_count + segment), tl.load(segment_ring + segment).to(tl.int64)
        tl.store(chunk_states + (zero + segment) * size + state_offset, state, mask=state_mask)
        k0, g0, b0 = _block_rows(
            0, first_row, count, ring_count, ring, head, key_head, d, key_mask, keys, decays, strengths, ring_keys,
            ring_decays, HEADS, KEY_HEADS, KEYS, LANES,
        )  # fmt: skip
        k1, g1, b1 = _block_rows(
            1, first_row, count, ring_count, ring, head, key_head, d, key_mask, keys, decays, strengths, ring_keys,
            ring_decays, HEADS, KEY_HEADS, KEYS, LANES,
        )  # fmt: skip
        k2, g2, b2 = _block_rows(
            2, first_row, count, ring_count, ring, head, key_head, d, key_mask, keys, decays, strengths, ring_keys,
            ring_decays, HEADS, KEY_HEADS, KEYS, LANES,
        )  # fmt: skip
        k3, g3, b3 = _block_rows(
            3, first_row, count, ring_count, ring, head, key_head, d, key_mask, keys, decays, strengths, ring_keys,
            ring_decays, HEADS, KEY_HEADS, KEYS, LANES,
        )  # fmt: skip
        p0 = tl.zeros((LANES, BLOCK), dtype=tl.float32)
        p1, p2, p3 = p0, p0, p0
        index = (zero + segment) * HEADS + head
        system, score = (
            systems + index * BLOCKS * LANES * LANES,
            scores + index * BLOCKS * BLOCKS * LANES * LANES,
        )
        if DELTA:
            p0 = times_state(k0, state, PRECISION) * tl.exp(g0)[:, None]
            p1 = times_state(k1, state, PRECISION) * tl.exp(g1)[:, None]
            p2 = times_state(k2, state, PRECISION) * tl.exp(g2)[:, None]
            p3 = times_state(k3, state, PRECISION) * tl.exp(g3)[:, None]
        u0 = _updated(
            0, p0, b0, first_row, count, ring_count, ring, head, v, mask, values, updates, ring_updates, ring_to,
            system, HEADS, VALUES, DELTA, LANES,
        )  # fmt: skip
        if DELTA:
            p1 = _less_block(p1, score, 1, 0, u0, BLOCKS, LANES, PRECISION)
            p2 = _less_block(p2, score, 2, 0, u0, BLOCKS, LANES, PRECISION)
            p3 = _less_block(p3, score, 3, 0, u0, BLOCKS, LANES, PRECISION)
        u1 = _updated(
            1, p1, b1, first_row, count, ring_count, ring, head, v, mask, values, updates, ring_updates, ring_to,
            system, HEADS, VALUES, DELTA, LANES,
        )  # fmt: skip
        if DELTA:
            p2 = _less_block(p2, score, 2, 1, u1, BLOCKS, LANES, PRECISION)
            p3 = _less_block(p3, score, 3, 1, u1, BLOCKS, LANES, PRECISION)
        u2 = _updated(
            2, p2, b2, first_row, count, ring_count, ring, head, v, mask, values, updates, ring_updates, ring_to,
            system, HEADS, VALUES, DELTA, LANES,
        )  # fmt: skip
        if DELTA:
            p3 = _less_block(p3, score, 3, 2, u2, BLOCKS, LANES, PRECISION)
        u3 = _updated(
            3, p3, b3, first_row, count, ring_count, ring, head, v, mask, values, updates, ring_updates, ring_to,
            system, HEADS, VALUES, DELTA, LANES,
        )  # fmt: skip
        if segment + 1 < end:
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
    BLOCK: tl.constexpr, DELTA: tl.constexpr, NODES: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one segment, one head and some of its values, from its state and all its updates."""
    segment, head = tl.program_id(0), tl.program_id(1)
    first_row, count = tl.load(segment_first + segment), tl.load(segment_count + segment)
    ring_count, ring = tl.load(segment_ring_count + segment), tl.load(segment_ring + segment).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    d = tl.arange(0, KEY_BLOCK)
    v = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    key_mask, mask = d < KEYS, v < VALUES
    state_at = (
        chunk_states + ((segment.to(tl.int64) * HEADS + head) * KEYS + d)[:, None] * VALUES + v[None, :]
    )
    state = tl.load(state_at, mask=key_mask[:, None] & mask[None, :], other=0.0)
    rows_done = 0
    while rows_done < count:
        lane = ring_count + rows_done
        num_rows = tl.minimum(count - rows_done, LANES - lane % LANES)
        row_tile(
            state, first_row + rows_done, num_rows, first_row, ring_count, 0, ring, head, key_head, d, key_mask, v,
            mask, queries, keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays, skip, out,
            lane, ring_to, ring_to, HEADS, KEY_HEADS, KEYS, VALUES, BLOCK, DELTA, False, NODES, LANES, PRECISION, True,
        )  # fmt: skip
        rows_done += num_rows


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
    block = max(16, triton.next_power_of_2(value_dim))
    is_delta = skip is None
    of_segments = segments.firsts, segments.counts, segments.ring_count
    systems = torch.empty(
        (num_segments, heads, BLOCKS.value, LANES, LANES), dtype=torch.float32, device=out.device
    )
    scores = keys.new_empty((num_segments, heads, BLOCKS.value, BLOCKS.value, LANES, LANES))
    if is_delta:
        _factors[(num_segments, heads)](
            keys, strengths, rows.decays, ring.keys, ring.decays, systems, scores, *of_segments, segments.ring,
            BLOCKS=BLOCKS.value, num_stages=1, **sizes,
        )  # fmt: skip
    chunk_states = torch.empty(
        (num_segments, heads, key_dim, value_dim), dtype=torch.float32, device=out.device
    )
    width = min(VALUES_OF_UPDATES, block)
    _update[(len(segments.begin), heads, triton.cdiv(value_dim, width))](
        keys, values, strengths, rows.decays, rows.updates, ring.keys, ring.updates, ring.decays, states, systems,
        scores, chunk_states, *of_segments, segments.next_state, segments.ring, segments.begin, segments.end,
        segments.state, ring_to, VALUES=value_dim, BLOCK=width, DELTA=is_delta, BLOCKS=BLOCKS.value, num_stages=1,
        **sizes,
    )  # fmt: skip
    width = min(VALUES_OF_OUTPUTS, block)
    _outputs[(num_segments, heads, triton.cdiv(value_dim, width))](
        queries, keys, values, strengths, rows.decays, rows.updates, ring.keys, ring.updates, ring.decays,
        chunk_states, states if skip is None else skip, out, *of_segments, segments.ring, ring_to,
        VALUES=value_dim, BLOCK=width, DELTA=is_delta, NODES=MAX_DRAFT_NODES, num_stages=1, **sizes,
    )  # fmt: skip
    return out
