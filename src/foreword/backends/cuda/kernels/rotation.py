"""Rotary embedding of a pass's queries and keys, with the write of keys and values to KV memory."""

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.ahead import (
    ahead,
    let_the_next_kernel_come,
    wait_for_the_kernel_before,
)
from foreword.kernels.launching import kernel

HEADS_AT_ONCE = 16
"""Heads of a row that one program rotates."""


@kernel()
def _rotate_and_keep(
    qkv, cosines, sines, slots, query_norm, key_norm, queries, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, NORMED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one row: queries into `queries`; keys and values are written to the row's KV slot.

    A head is processed as pairs: first those of its leading TURNED numbers, then the others, which are not
    rotated.
    """
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = DIM // 2
    turned: tl.constexpr = TURNED // 2
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    pair = tl.arange(0, HALF_BLOCK)
    if TURNED == DIM:
        i, other = pair[None, :], half
    else:
        i = tl.where(pair < turned, pair, pair + turned)[None, :]
        other = tl.where(pair < turned, turned, half - turned)[None, :]
    there = (head < HEADS + 2 * KV_HEADS)[:, None] & (pair < half)[None, :]
    is_query = there & (head < HEADS)[:, None]
    is_key = there & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    is_value = there & (head >= HEADS + KV_HEADS)[:, None]
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM + i
    first = tl.load(source, mask=there, other=0.0)
    second = tl.load(source + other, mask=there, other=0.0)
    slot = tl.load(slots + row).to(tl.int64)
    value_at = values + (slot * KV_HEADS + head - HEADS - KV_HEADS)[:, None] * DIM + i
    tl.store(value_at, first, mask=is_value)
    tl.store(value_at + other, second, mask=is_value)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / DIM + eps)[:, None]
        kind = qkv.dtype.element_ty
        gain = tl.where((head < HEADS)[:, None], query_norm, key_norm) + i
        a = (tl.load(gain, mask=there, other=0.0) * (a * scale).to(kind)).to(tl.float32)
        b = (tl.load(gain + other, mask=there, other=0.0) * (b * scale).to(kind)).to(tl.float32)
    cos = tl.load(cosines + row * turned + pair, mask=pair < turned, other=1.0)[None, :]
    sin = tl.load(sines + row * turned + pair, mask=pair < turned, other=0.0)[None, :]
    left, right = (
        (a * cos - b * sin).to(queries.dtype.element_ty),
        (b * cos + a * sin).to(queries.dtype.element_ty),
    )
    query_at = queries + (row * HEADS + head)[:, None] * DIM + i
    tl.store(query_at, left, mask=is_query)
    tl.store(query_at + other, right, mask=is_query)
    key_at = keys + (slot * KV_HEADS + head - HEADS)[:, None] * DIM + i
    tl.store(key_at, left, mask=is_key)
    tl.store(key_at + other, right, mask=is_key)


def rotate_and_keep(
    qkv: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
) -> Tensor:
    """Split qkv [rows, heads + 2 kv heads, dim]: rotated queries to `out`, rotated keys and values to their slots.

    `norms` are of queries and keys, before the rotation; cosines and sines are float32 [rows, rotated numbers / 2];
    keys and values are [physical rows, kv heads, dim].
    """
    rows, heads, dim = out.shape
    kv_heads, turned = keys.shape[1], 2 * cos_sin[0].shape[1]
    query_norm, key_norm = norms or (qkv, qkv)
    _rotate_and_keep[(rows, triton.cdiv(heads + 2 * kv_heads, HEADS_AT_ONCE))](
        qkv, *cos_sin, slots, query_norm, key_norm, out, keys, values, eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, TURNED=turned, HEAD_BLOCK=HEADS_AT_ONCE,
        HALF_BLOCK=triton.next_power_of_2(dim // 2), NORMED=norms is not None, num_warps=8, **ahead(out),
    )  # fmt: skip
    return out
