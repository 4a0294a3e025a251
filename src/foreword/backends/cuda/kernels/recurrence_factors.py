"""How the rows of a chunk depend on its earlier rows, for the gated delta rule: this does not depend on the state."""

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.linear import precision_of
from foreword.backends.cuda.kernels.recurrence import (
    LANES,
    WARPS,
    RingRows,
    Segments,
    load_decays,
    load_numbers,
)
from foreword.kernels.launching import kernel
from foreword.kv.chunks import CHUNK

BLOCKS = tl.constexpr(4)
"""Blocks of a chunk."""

assert BLOCKS.value * LANES == CHUNK


@triton.jit
def block_rows(
    block, first_row, count, ring_count, ring, head, key_head, d, key_mask, keys, decays, strengths, ring_keys,
    ring_decays, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
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
        k, g, strength = block_rows(
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
            k2, g2, _ = block_rows(
                earlier, first_row, count, ring_count, ring, head, key_head, d, d < KEYS, keys, decays, strengths,
                ring_keys, ring_decays, HEADS, KEY_HEADS, KEYS, LANES,
            )  # fmt: skip
            score = _scores(k, g, k2, g2, is_own[:, None], PRECISION).to(keys.dtype.element_ty)
            scores_at = scores + (index * BLOCKS * BLOCKS + block * BLOCKS + earlier) * LANES * LANES
            tl.store(scores_at + i[:, None] * LANES + i[None, :], score)


def factors(
    keys: Tensor,
    strengths: Tensor,
    decays: Tensor,
    ring: RingRows,
    segments: Segments,
    num_segments: int,
    is_delta: bool,
) -> tuple[Tensor, Tensor]:
    """Return the factors within blocks, and between blocks; without the delta rule, both are not computed.

    Within: float32 [segments, heads, blocks, earlier row, row]. Between: [segments, heads, block, earlier block, row,
    earlier row].
    """
    heads, (key_heads, key_dim) = strengths.shape[1], keys.shape[1:]
    systems = strengths.new_empty((num_segments, heads, BLOCKS.value, LANES, LANES))
    scores = keys.new_empty((num_segments, heads, BLOCKS.value, BLOCKS.value, LANES, LANES))
    if is_delta:
        _factors[(num_segments, heads)](
            keys, strengths, decays, ring.keys, ring.decays, systems, scores, segments.firsts, segments.counts,
            segments.ring_count, segments.ring, HEADS=heads, KEY_HEADS=key_heads, KEYS=key_dim,
            KEY_BLOCK=max(16, triton.next_power_of_2(key_dim)), BLOCKS=BLOCKS.value, LANES=LANES,
            PRECISION=precision_of(keys), num_warps=WARPS, num_stages=1,
        )  # fmt: skip
    return systems, scores
