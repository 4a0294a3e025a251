"""Recurrences with a state: the gated delta rule and Mamba-2.

A row is computed from the state before its chunk and from the stored rows of its ancestors in the chunk. A lane is a
position in the chunk, and a block is 16 lanes. Each ancestor of a row is in the lane of its own position. A tile
computes rows of one block. It sums in a fixed order: the state, one product with 16 lanes for every earlier block, then
its own block. So a row has the same bits in prompts, decoding, chains and trees. One program computes all rows of a
request, for one head and some of the head's values.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.backends.cuda.kernels.dependent_launch import begin_kernel, pdl_options
from foreword.backends.cuda.kernels.linear import precision_of
from foreword.kernels.launching import kernel
from foreword.kv.chunks import CHUNK

LANES = 16
"""Positions of a block, and maximum rows of a tile: the smallest side of a product on tensor cores."""

VALUES_AT_ONCE = 32
"""Values of a head that one program computes."""

WARPS = 4
"""Warps of a program. The number decides in which order sums are added, so it is the same for all passes."""


class Segments(NamedTuple):
    """Segments of a pass: a segment is the rows of one request in one chunk."""

    # int32 [segments]
    firsts: Tensor  # first row of the segment in the pass
    counts: Tensor  # number of rows
    ring_count: Tensor  # earlier rows of the chunk, which are in the ring
    next_state: Tensor  # slot to store the state after the chunk in; -1: the state is not stored
    ring: Tensor  # physical ring row of the chunk's first position; read only if it has earlier rows
    # int32 [requests]
    begin: Tensor  # first segment of the request
    end: Tensor  # one past its last segment
    state: Tensor  # slot of the state before its first segment's chunk
    first_node: Tensor  # row of its first draft token in the pass


class RingRows(NamedTuple):
    """What rows of one layer store: of the rows of a pass, or of a ring."""

    keys: Tensor  # [rows, key heads, key size]
    updates: Tensor  # [rows, heads, value size]
    decays: Tensor  # float32 [rows, heads], sums of log decays from the start of the chunk


@triton.jit
def _lane_rows(
    lane, row, first_row, ring_count, first_node, ancestors, TREES: tl.constexpr, NODES: tl.constexpr
):
    """Return for each lane the row of the pass that holds the token there: an ancestor of `row`, or `row` itself."""
    at = first_row + lane - ring_count
    if TREES:
        depth = at - first_node
        node = tl.load(ancestors + row * NODES + depth, mask=(depth >= 0) & (depth < NODES), other=0)
        at = tl.where(depth >= 0, first_node + node, at)
    return at.to(tl.int64)


@triton.jit
def load_numbers(
    at, ring_at, new, ring, is_new, is_known, head, i, mask, HEADS: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    """Load [lanes, numbers] of one head: from ring rows if `is_known`, from the pass's rows if `is_new`, else 0."""
    new_ptrs = new + (at * HEADS + head)[:, None] * WIDTH + i[None, :]
    ring_ptrs = ring + (ring_at * HEADS + head)[:, None] * WIDTH + i[None, :]
    fresh = tl.load(new_ptrs, mask=is_new[:, None] & mask[None, :], other=0.0)
    stored = tl.load(ring_ptrs, mask=is_known[:, None] & mask[None, :], other=0.0)
    return tl.where(is_known[:, None], stored, fresh)


@triton.jit
def load_decays(at, ring_at, new, ring, is_new, is_known, head, HEADS: tl.constexpr) -> tl.tensor:
    """Load the decays of one head, [lanes], as `load_numbers` does."""
    fresh = tl.load(new + at * HEADS + head, mask=is_new, other=0.0)
    return tl.where(is_known, tl.load(ring + ring_at * HEADS + head, mask=is_known, other=0.0), fresh)


@triton.jit
def times_state(x, state, PRECISION: tl.constexpr) -> tl.tensor:
    """Return x [lanes, keys] times the float32 state [keys, values], which is split in two if x has 16 bits."""
    if x.dtype == tl.float32:
        return tl.dot(x, state, input_precision=PRECISION)
    high = state.to(x.dtype)
    low = (state - high.to(tl.float32)).to(x.dtype)
    return tl.dot(x, high, tl.dot(x, low))


@triton.jit
def decayed(x, g) -> tl.tensor:
    """Return x [lanes, numbers] times exp(g) [lanes], rounded: no compiler joins the product with a later sum."""
    factor = tl.broadcast_to(tl.exp(g)[:, None], x.shape)
    return tl.fma(x, factor, tl.zeros_like(x))


@triton.jit
def _forward_substitution(updates, system, dtype: tl.constexpr, count, LANES: tl.constexpr):
    """Subtract from every row its factors in `system` times all earlier rows, in order; earlier rows are rounded."""
    lane = tl.arange(0, LANES)
    for step in range(0, count):
        factor = tl.sum(tl.where((lane == step)[None, :], system, 0.0), axis=1)
        updates = without_row(updates, lane == step, factor, dtype)
    return updates


@triton.jit
def without_row(updates, is_row, factor, dtype: tl.constexpr) -> tl.tensor:
    """Subtract from every row its factor times the row that `is_row` marks, which is rounded first."""
    row = tl.sum(tl.where(is_row[:, None], updates, 0.0), axis=0).to(dtype).to(tl.float32)
    factor = tl.broadcast_to(factor[:, None], updates.shape)
    row = tl.broadcast_to(row[None, :], updates.shape)
    return tl.fma(-factor, row, updates)


@triton.jit
def _load_block(
    lane, at, ring, ring_count, head, key_head, d, key_mask, v, mask, keys, decays, updates, ring_keys, ring_updates,
    ring_decays, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Load keys, updates and decays of a block of lanes, whose rows are all computed."""
    is_known, is_new = lane < ring_count, lane >= ring_count
    k = load_numbers(
        at, ring + lane, keys, ring_keys, is_new, is_known, key_head, d, key_mask, KEY_HEADS, KEYS
    )
    u = load_numbers(at, ring + lane, updates, ring_updates, is_new, is_known, head, v, mask, HEADS, VALUES)
    return k, u, load_decays(at, ring + lane, decays, ring_decays, is_new, is_known, head, HEADS)


@triton.jit
def _next_state(
    state, first_row, ring_count, ring, head, key_head, d, key_mask, v, mask, keys, decays, updates, ring_keys,
    ring_updates, ring_decays, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the state after all rows of a chunk."""
    last = CHUNK - 1 + tl.arange(0, 1)
    at = (first_row + last - ring_count).to(tl.int64)
    last_decay = load_decays(
        at, ring + last, decays, ring_decays, last >= ring_count, last < ring_count, head, HEADS
    )
    total = tl.sum(last_decay, axis=0)
    state = state * tl.exp(total)
    for block in range(0, CHUNK // LANES):
        lane = block * LANES + tl.arange(0, LANES)
        k, u, g = _load_block(
            lane, (first_row + lane - ring_count).to(tl.int64), ring, ring_count, head, key_head, d, key_mask, v, mask,
            keys, decays, updates, ring_keys, ring_updates, ring_decays, HEADS, KEY_HEADS, KEYS, VALUES,
        )  # fmt: skip
        decay = (u.to(tl.float32) * tl.exp(total - g)[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(k), decay, state, input_precision=PRECISION)
    return state


@triton.jit
def row_tile(
    state, row, num_rows, first_row, ring_count, first_node, ring, head, key_head, d, key_mask, v, mask,
    queries, keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays, skip, out,
    lane, ring_to, ancestors,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    DELTA: tl.constexpr, TREES: tl.constexpr, NODES: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr,
    UPDATED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute `num_rows` rows from `row` on, in lanes from `lane` on, all in one block; store outputs and updates.

    With UPDATED, the updates are computed already.
    """
    lanes = tl.arange(0, LANES)
    block_lane = lane // LANES * LANES + lanes
    dtype = keys.dtype.element_ty
    is_known = block_lane < ring_count
    is_own = (block_lane >= lane) & (block_lane < lane + num_rows)
    is_new = (block_lane >= ring_count) & (block_lane < lane + num_rows)
    at = _lane_rows(block_lane, row, first_row, ring_count, first_node, ancestors, TREES, NODES)
    k = load_numbers(
        at, ring + block_lane, keys, ring_keys, is_new, is_known, key_head, d, key_mask, KEY_HEADS, KEYS
    )
    q = load_numbers(at, at, queries, queries, is_own, block_lane < 0, key_head, d, key_mask, KEY_HEADS, KEYS)
    g = load_decays(at, ring + block_lane, decays, ring_decays, is_new, is_known, head, HEADS)
    value_index = (at * HEADS + head)[:, None] * VALUES + v[None, :]
    store_mask = is_own[:, None] & mask[None, :]
    value = tl.load(values + value_index, mask=store_mask, other=0.0).to(tl.float32)
    strength = tl.load(strengths + at * HEADS + head, mask=is_own, other=0.0)
    output = times_state(q, state, PRECISION) * tl.exp(g)[:, None]
    predicted = tl.zeros((LANES, VALUE_BLOCK), dtype=tl.float32)
    if DELTA and not UPDATED:
        predicted = decayed(times_state(k, state, PRECISION), g)
    for block in range(0, lane // LANES):
        earlier_lane = block * LANES + lanes
        k2, u2, g2 = _load_block(
            earlier_lane, _lane_rows(earlier_lane, row, first_row, ring_count, first_node, ancestors, TREES, NODES),
            ring, ring_count, head, key_head, d, key_mask, v, mask, keys, decays, updates, ring_keys, ring_updates,
            ring_decays,
            HEADS, KEY_HEADS, KEYS, VALUES,
        )  # fmt: skip
        decay = tl.exp(tl.where(is_own[:, None], g[:, None] - g2[None, :], -float("inf")))
        if DELTA and not UPDATED:
            scores = (tl.dot(k, tl.trans(k2), input_precision=PRECISION) * decay).to(dtype)
            predicted = tl.dot(scores, u2, predicted, input_precision=PRECISION)
        scores = (tl.dot(q, tl.trans(k2), input_precision=PRECISION) * decay).to(dtype)
        output = tl.dot(scores, u2, output, input_precision=PRECISION)
    is_path = is_own[:, None] & (lanes[None, :] <= lanes[:, None])
    decay = tl.exp(tl.where(is_path, g[:, None] - g[None, :], -float("inf")))
    is_done = (block_lane >= ring_count) & (block_lane < lane + (num_rows if UPDATED else 0))
    update = load_numbers(
        at, ring + block_lane, updates, ring_updates, is_done, is_known, head, v, mask, HEADS, VALUES
    )
    if not UPDATED:
        fresh = strength[:, None] * (value - predicted)
        update = tl.where(is_own[:, None], fresh, update.to(tl.float32))
        if DELTA:
            system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * strength[:, None]
            system = tl.where(lanes[None, :] < lanes[:, None], system, 0.0)
            update = _forward_substitution(update, system, dtype, lane % LANES + num_rows - 1, LANES)
    stored = update.to(dtype)
    scores = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay).to(dtype)
    output = tl.dot(scores, stored, output, input_precision=PRECISION)
    if not DELTA:
        output += tl.load(skip + head) * value
    tl.store(out + value_index, output, mask=store_mask)
    if not UPDATED:
        ring_row = tl.load(ring_to + at, mask=is_own, other=-1).to(tl.int64)
        store_updates(stored, at, ring_row, head, v, store_mask, updates, ring_updates, HEADS, VALUES)


@triton.jit
def store_updates(
    stored, at, ring_row, head, v, mask, updates, ring_updates, HEADS: tl.constexpr, VALUES: tl.constexpr
) -> None:
    """Store updates [lanes, values] of the pass's rows `at`, and at `ring_row` unless it is negative."""
    tl.store(updates + (at * HEADS + head)[:, None] * VALUES + v[None, :], stored, mask=mask)
    ring_ptrs = ring_updates + (ring_row * HEADS + head)[:, None] * VALUES + v[None, :]
    tl.store(ring_ptrs, stored, mask=mask & (ring_row >= 0)[:, None])


@kernel()
def _recur(
    queries, keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays, states, skip, out,
    segment_first, segment_count, segment_ring_count, segment_next_state, segment_ring, request_begin, request_end,
    request_state, request_first_node, positions, ring_to, ancestors,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUES: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, DELTA: tl.constexpr, TREES: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr,
    LANES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_kernel(PDL)
    request, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(request_begin + request), tl.load(request_end + request)
    if begin >= end:
        return
    key_head = head // (HEADS // KEY_HEADS)
    d = tl.arange(0, KEY_BLOCK)
    v = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    key_mask, mask = d < KEYS, v < VALUES
    size: tl.constexpr = HEADS * KEYS * VALUES
    state_ptrs = states + (head * KEYS + d)[:, None] * VALUES + v[None, :]
    state_mask = key_mask[:, None] & mask[None, :]
    slot = tl.load(request_state + request).to(tl.int64)
    state = tl.load(state_ptrs + slot * size, mask=state_mask, other=0.0)
    first_node = tl.load(request_first_node + request)
    for segment in range(begin, end):
        first_row, count = tl.load(segment_first + segment), tl.load(segment_count + segment)
        ring_count, ring = tl.load(segment_ring_count + segment), tl.load(segment_ring + segment).to(tl.int64)
        rows_done = 0
        while rows_done < count:
            row = first_row + rows_done
            lane = tl.load(positions + row) % CHUNK
            num_rows = tl.minimum(count - rows_done, LANES - lane % LANES)
            if TREES:
                num_rows = tl.where(row >= first_node, 1, tl.minimum(num_rows, first_node - row))
            row_tile(
                state, row, num_rows, first_row, ring_count, first_node, ring, head, key_head, d, key_mask, v, mask,
                queries, keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays, skip, out,
                lane, ring_to, ancestors, HEADS, KEY_HEADS, KEYS, VALUES, VALUE_BLOCK, DELTA, TREES, NODES, LANES,
                PRECISION, UPDATED=False,
            )  # fmt: skip
            rows_done += num_rows
            tl.debug_barrier()  # the next tile's threads read what others have stored
        if segment + 1 < end:
            state = _next_state(
                state, first_row, ring_count, ring, head, key_head, d, key_mask, v, mask, keys, decays, updates,
                ring_keys, ring_updates, ring_decays, HEADS, KEY_HEADS, KEYS, VALUES, CHUNK, LANES, PRECISION,
            )  # fmt: skip
            slot = tl.load(segment_next_state + segment).to(tl.int64)
            if slot >= 0:
                tl.store(state_ptrs + slot * size, state, mask=state_mask)


def recur(
    parts: tuple[Tensor, Tensor, Tensor],
    strengths: Tensor,
    rows: RingRows,
    ring: RingRows,
    states: Tensor,
    skip: Tensor | None,
    segments: Segments,
    row_arrays: tuple[Tensor, Tensor],
    ancestors: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Compute the outputs of all rows, float32 `out` [rows, heads, value size]; store their updates and new states.

    - `parts`: queries, keys and values.
    - `strengths`: float32 [rows, heads], factors of the updates.
    - `rows`: of the pass; keys and decays are given, updates are written. `ring`: of this layer.
    - `skip`: Mamba-2's D; None: the gated delta rule.
    - `row_arrays`: positions and ring rows to write (-1: none), int32 [rows].
    - `ancestors`: int32 [rows, nodes], the draft tokens above each node; None: no draft branches.
    """
    queries, keys, values = parts
    _, heads, value_dim = out.shape
    key_heads, key_dim = keys.shape[1:]
    width = min(VALUES_AT_ONCE, max(16, triton.next_power_of_2(value_dim)))
    _recur[(len(segments.begin), heads, triton.cdiv(value_dim, width))](
        queries, keys, values, strengths, rows.decays, rows.updates, ring.keys, ring.updates, ring.decays, states,
        states if skip is None else skip, out, *segments, *row_arrays,
        row_arrays[0] if ancestors is None else ancestors, HEADS=heads, KEY_HEADS=key_heads, KEYS=key_dim,
        KEY_BLOCK=max(16, triton.next_power_of_2(key_dim)),
        VALUES=value_dim, VALUE_BLOCK=width, DELTA=skip is None, TREES=ancestors is not None, NODES=MAX_DRAFT_NODES,
        CHUNK=CHUNK, LANES=LANES, PRECISION=precision_of(keys), num_warps=WARPS, num_stages=1, **pdl_options(out),
    )  # fmt: skip
    return out
