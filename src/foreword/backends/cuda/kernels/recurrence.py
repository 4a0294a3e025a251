"""Recurrences with a state: the gated delta rule and Mamba-2.

A row is computed from the state before its chunk and from the stored rows of its ancestors in the chunk. Each ancestor
is in the lane of its position. A tile has the lanes of one block of 16 positions. Its sums are in a fixed order: the
state, one product with 16 lanes for every earlier block, then its own block. So a row has the same bits in prompts,
decoding, chains and trees. One program computes all rows of a request, for one head and some of its values.
"""

from typing import NamedTuple

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
from foreword.kv.chunks import CHUNK

LANES = 16
"""Positions of a block, and rows of a tile: the least size of a tensor core's product."""

VALUES_AT_ONCE = 32
"""Values of a head that one program computes."""

WARPS = 4
"""Warps of a program; they decide in which order sums are taken, so there is one number for all passes."""


class Segments(NamedTuple):
    """Rows of requests by chunk, int32 [segments]; and what every request reads, int32 [requests]."""

    firsts: Tensor  # row of the pass
    counts: Tensor  # rows
    known: Tensor  # rows of the chunk in the ring
    fold: Tensor  # slot of the state after the chunk; -1: not kept
    begin: Tensor  # of a request: its first segment
    end: Tensor  # one past its last segment
    state: Tensor  # slot
    ring: Tensor  # physical row of its chunk's first position
    nodes: Tensor  # row of its first draft node


class RingRows(NamedTuple):
    """Stored rows of one layer, by row of the pass or by ring row."""

    keys: Tensor  # [rows, key heads, key size]
    updates: Tensor  # [rows, heads, value size]
    decays: Tensor  # float32 [rows, heads]


@triton.jit
def _lane_rows(lane, row, first, known, nodes, ancestors, TREES: tl.constexpr, NODES: tl.constexpr):
    """Return the row of the pass that is in each lane, for an ancestor of `row` or itself."""
    at = first + lane - known
    if TREES:
        depth = at - nodes
        node = tl.load(ancestors + row * NODES + depth, mask=(depth >= 0) & (depth < NODES), other=0)
        at = tl.where(depth >= 0, nodes + node, at)
    return at.to(tl.int64)


@triton.jit
def _numbers(
    at, kept_at, new, ring, is_new, is_kept, head, i, there, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """Return [lanes, numbers] of one head: of rows of this pass, or of ring rows."""
    own = new + (at * HEADS + head)[:, None] * WIDTH + i[None, :]
    known = ring + (kept_at * HEADS + head)[:, None] * WIDTH + i[None, :]
    fresh = tl.load(own, mask=is_new[:, None] & there[None, :], other=0.0)
    return tl.where(
        is_kept[:, None], tl.load(known, mask=is_kept[:, None] & there[None, :], other=0.0), fresh
    )


@triton.jit
def _decays(at, kept_at, new, ring, is_new, is_kept, head, HEADS: tl.constexpr):
    fresh = tl.load(new + at * HEADS + head, mask=is_new, other=0.0)
    return tl.where(is_kept, tl.load(ring + kept_at * HEADS + head, mask=is_kept, other=0.0), fresh)


@triton.jit
def _through(x, state, PRECISION: tl.constexpr):
    """Return x [lanes, keys] times the state [keys, values], which has the precision of two numbers."""
    if x.dtype == tl.float32:
        return tl.dot(x, state, input_precision=PRECISION)
    high = state.to(x.dtype)
    low = (state - high.to(tl.float32)).to(x.dtype)
    return tl.dot(x, high, tl.dot(x, low))


@triton.jit
def _eliminated(updates, system, kind: tl.constexpr, count, LANES: tl.constexpr):
    """Subtract from every row its factors times the rows before it, which are rounded first, in order."""
    lane = tl.arange(0, LANES)
    for step in range(0, count):
        one = tl.sum(tl.where((lane == step)[:, None], updates, 0.0), axis=0).to(kind).to(tl.float32)
        factor = tl.sum(tl.where((lane == step)[None, :], system, 0.0), axis=1)
        updates -= factor[:, None] * one[None, :]
    return updates


@triton.jit
def _whole_block(
    lane, at, ring, known, head, key_head, d, key_there, v, there, keys, decays, updates, ring_keys, ring_updates,
    ring_decays, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Return keys, updates and decays of a block whose rows are all known."""
    is_kept, is_new = lane < known, lane >= known
    k = _numbers(at, ring + lane, keys, ring_keys, is_new, is_kept, key_head, d, key_there, KEY_HEADS, KEYS)
    u = _numbers(at, ring + lane, updates, ring_updates, is_new, is_kept, head, v, there, HEADS, VALUES)
    return k, u, _decays(at, ring + lane, decays, ring_decays, is_new, is_kept, head, HEADS)


@triton.jit
def _folded(
    state, first, known, ring, head, key_head, d, key_there, v, there, keys, decays, updates, ring_keys, ring_updates,
    ring_decays, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the state after all rows of a chunk."""
    last = CHUNK - 1 + tl.arange(0, 1)
    at = (first + last - known).to(tl.int64)
    ends = _decays(at, ring + last, decays, ring_decays, last >= known, last < known, head, HEADS)
    total = tl.sum(ends, axis=0)
    state = state * tl.exp(total)
    for block in range(0, CHUNK // LANES):
        lane = block * LANES + tl.arange(0, LANES)
        k, u, g = _whole_block(
            lane, (first + lane - known).to(tl.int64), ring, known, head, key_head, d, key_there, v, there,
            keys, decays, updates, ring_keys, ring_updates, ring_decays, HEADS, KEY_HEADS, KEYS, VALUES,
        )  # fmt: skip
        left = (u.to(tl.float32) * tl.exp(total - g)[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(k), left, state, input_precision=PRECISION)
    return state


@triton.jit
def _tile(
    state, row, some, first, known, nodes, ring, head, key_head, d, key_there, v, there,
    queries, keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays, skip, out,
    lane, ring_to, ancestors,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    DELTA: tl.constexpr, TREES: tl.constexpr, NODES: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute `some` rows from `row`, in `lane`, on, all in one block; store what they read and their updates."""
    lanes = tl.arange(0, LANES)
    own = lane // LANES * LANES + lanes
    kind = keys.dtype.element_ty
    is_kept = own < known
    is_own = (own >= lane) & (own < lane + some)
    is_new = (own >= known) & (own < lane + some)
    at = _lane_rows(own, row, first, known, nodes, ancestors, TREES, NODES)
    k = _numbers(at, ring + own, keys, ring_keys, is_new, is_kept, key_head, d, key_there, KEY_HEADS, KEYS)
    q = _numbers(at, at, queries, queries, is_own, own < 0, key_head, d, key_there, KEY_HEADS, KEYS)
    g = _decays(at, ring + own, decays, ring_decays, is_new, is_kept, head, HEADS)
    of_row = (at * HEADS + head)[:, None] * VALUES + v[None, :]
    shown = is_own[:, None] & there[None, :]
    value = tl.load(values + of_row, mask=shown, other=0.0).to(tl.float32)
    strength = tl.load(strengths + at * HEADS + head, mask=is_own, other=0.0)
    read = _through(q, state, PRECISION) * tl.exp(g)[:, None]
    found = tl.zeros((LANES, BLOCK), dtype=tl.float32)
    if DELTA:
        found = _through(k, state, PRECISION) * tl.exp(g)[:, None]
    for before in range(0, lane // LANES):
        lane2 = before * LANES + lanes
        k2, u2, g2 = _whole_block(
            lane2, _lane_rows(lane2, row, first, known, nodes, ancestors, TREES, NODES), ring, known, head, key_head,
            d, key_there, v, there, keys, decays, updates, ring_keys, ring_updates, ring_decays,
            HEADS, KEY_HEADS, KEYS, VALUES,
        )  # fmt: skip
        left = tl.exp(tl.where(is_own[:, None], g[:, None] - g2[None, :], -float("inf")))
        if DELTA:
            scores = (tl.dot(k, tl.trans(k2), input_precision=PRECISION) * left).to(kind)
            found = tl.dot(scores, u2, found, input_precision=PRECISION)
        scores = (tl.dot(q, tl.trans(k2), input_precision=PRECISION) * left).to(kind)
        read = tl.dot(scores, u2, read, input_precision=PRECISION)
    is_path = is_own[:, None] & (lanes[None, :] <= lanes[:, None])
    left = tl.exp(tl.where(is_path, g[:, None] - g[None, :], -float("inf")))
    is_done = (own >= known) & (own < lane)
    update = _numbers(at, ring + own, updates, ring_updates, is_done, is_kept, head, v, there, HEADS, VALUES)
    fresh = strength[:, None] * (value - found)
    update = tl.where(is_own[:, None], fresh, update.to(tl.float32))
    if DELTA:
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * left * strength[:, None]
        system = tl.where(lanes[None, :] < lanes[:, None], system, 0.0)
        update = _eliminated(update, system, kind, lane % LANES + some - 1, LANES)
    stored = update.to(kind)
    scores = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * left).to(kind)
    read = tl.dot(scores, stored, read, input_precision=PRECISION)
    if not DELTA:
        read += tl.load(skip + head) * value
    tl.store(out + of_row, read, mask=shown)
    tl.store(updates + of_row, stored, mask=shown)
    place = tl.load(ring_to + at, mask=is_own, other=-1).to(tl.int64)
    ring_at = ring_updates + (place * HEADS + head)[:, None] * VALUES + v[None, :]
    tl.store(ring_at, stored, mask=shown & (place >= 0)[:, None])


@kernel()
def _recur(
    queries, keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays, states, skip, out,
    segment_first, segment_count, segment_known, segment_fold, request_begin, request_end, request_state,
    request_ring, request_nodes, positions, ring_to, ancestors,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, DELTA: tl.constexpr, TREES: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr,
    LANES: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    request, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(request_begin + request), tl.load(request_end + request)
    if begin >= end:
        return
    key_head = head // (HEADS // KEY_HEADS)
    d = tl.arange(0, KEY_BLOCK)
    v = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    key_there, there = d < KEYS, v < VALUES
    size: tl.constexpr = HEADS * KEYS * VALUES
    of_state = states + (head * KEYS + d)[:, None] * VALUES + v[None, :]
    in_state = key_there[:, None] & there[None, :]
    slot = tl.load(request_state + request).to(tl.int64)
    state = tl.load(of_state + slot * size, mask=in_state, other=0.0)
    ring, nodes = tl.load(request_ring + request).to(tl.int64), tl.load(request_nodes + request)
    for segment in range(begin, end):
        first, count = tl.load(segment_first + segment), tl.load(segment_count + segment)
        known, done = tl.load(segment_known + segment), 0
        while done < count:
            row = first + done
            lane = tl.load(positions + row) % CHUNK
            some = tl.minimum(count - done, LANES - lane % LANES)
            if TREES:
                some = tl.where(row >= nodes, 1, tl.minimum(some, nodes - row))
            _tile(
                state, row, some, first, known, nodes, ring, head, key_head, d, key_there, v, there,
                queries, keys, values, strengths, decays, updates, ring_keys, ring_updates, ring_decays, skip, out,
                lane, ring_to, ancestors, HEADS, KEY_HEADS, KEYS, VALUES, BLOCK, DELTA, TREES, NODES, LANES, PRECISION,
            )  # fmt: skip
            done += some
            tl.debug_barrier()  # the next tile's threads read what others have stored
        if segment + 1 < end:
            state = _folded(
                state, first, known, ring, head, key_head, d, key_there, v, there, keys, decays, updates, ring_keys,
                ring_updates, ring_decays, HEADS, KEY_HEADS, KEYS, VALUES, CHUNK, LANES, PRECISION,
            )  # fmt: skip
            slot = tl.load(segment_fold + segment).to(tl.int64)
            if slot >= 0:
                tl.store(of_state + slot * size, state, mask=in_state)


def recur(
    parts: tuple[Tensor, Tensor, Tensor],
    strengths: Tensor,
    rows: RingRows,
    ring: RingRows,
    states: Tensor,
    skip: Tensor | None,
    segments: Segments,
    places: tuple[Tensor, Tensor],
    ancestors: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Compute what all rows read, float32 out [rows, heads, value size], and store their updates and new states.

    `parts` are queries, keys and values; `skip` is Mamba-2's, None: the gated delta rule. `rows` are of this pass,
    with keys and decays; `ring` of this layer. `places` are positions and ring rows to write of the pass's rows;
    `ancestors` [rows, nodes] are the draft nodes above each node, if any draft branches.
    """
    queries, keys, values = parts
    _, heads, value_dim = out.shape
    key_heads, key_dim = keys.shape[1:]
    block = min(VALUES_AT_ONCE, max(16, triton.next_power_of_2(value_dim)))
    _recur[(len(segments.begin), heads, triton.cdiv(value_dim, block))](
        queries, keys, values, strengths, rows.decays, rows.updates, ring.keys, ring.updates, ring.decays, states,
        states if skip is None else skip, out, *segments, *places, places[0] if ancestors is None else ancestors,
        HEADS=heads, KEY_HEADS=key_heads, KEYS=key_dim, KEY_BLOCK=max(16, triton.next_power_of_2(key_dim)),
        VALUES=value_dim, BLOCK=block, DELTA=skip is None, TREES=ancestors is not None, NODES=MAX_DRAFT_NODES,
        CHUNK=CHUNK, LANES=LANES, PRECISION=precision_of(keys), num_warps=WARPS, num_stages=1, **ahead(out),
    )  # fmt: skip
    return out
