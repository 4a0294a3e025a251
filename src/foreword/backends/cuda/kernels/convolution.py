"""Short convolutions of recurrent layers, over the inputs of each row's newest ancestors.

An input is read from this pass, from the request's ring, or from the state before its chunk (`StatePlan.windows`).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.ahead import (
    ahead,
    let_the_next_kernel_come,
    wait_for_the_kernel_before,
)
from foreword.kernels.launching import kernel

CHANNELS_AT_ONCE = 512
"""Channels of a row that one program convolves; at least one head."""


class Inputs(NamedTuple):
    """Memory and indices of the inputs of one layer's convolution."""

    windows: Tensor  # int32 [rows, kernel - 1], oldest first: a row of this pass, or -1 - index below
    ring_to: Tensor  # int32 [rows], ring row to write; -1: none
    state_to: Tensor  # int32 [rows], state whose inputs are the row's window; -1: none
    ring: Tensor  # [ring rows, channels], indices from 0
    states: Tensor  # [states, kernel - 1, channels], indices after those of the ring


@triton.jit
def _input(source, projected, ring, states, channel, there, stride, ring_rows, CHANNELS, GATED: tl.constexpr):
    """Return the input that a window's entry names; GATED: the product of the first and last third of a row."""
    if source >= 0:
        at = projected + source * stride + channel
        x = tl.load(at, mask=there, other=0.0)
        if GATED:
            x = (x.to(tl.float32) * tl.load(at + 2 * CHANNELS, mask=there, other=0.0).to(tl.float32)).to(
                x.dtype
            )
    else:
        kept = -1 - source
        if kept < ring_rows:
            x = tl.load(ring + kept * CHANNELS + channel, mask=there, other=0.0)
        else:
            x = tl.load(states + (kept - ring_rows) * CHANNELS + channel, mask=there, other=0.0)
    return x


@triton.jit
def _convolved(
    row, projected, windows, ring_to, state_to, ring, states, weight, bias, channel, there, stride, ring_rows,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return one row's convolution in float32, summed from old to new; keep its inputs in ring and state."""
    slot = tl.load(state_to + row).to(tl.int64)
    total = tl.zeros(channel.shape, dtype=tl.float32)
    for tap in tl.static_range(KERNEL - 1):
        source = tl.load(windows + row * (KERNEL - 1) + tap).to(tl.int64)
        x = _input(source, projected, ring, states, channel, there, stride, ring_rows, CHANNELS, GATED)
        total += x.to(tl.float32) * tl.load(weight + channel * KERNEL + tap, mask=there, other=0.0).to(
            tl.float32
        )
        if slot >= 0:
            tl.store(states + (slot * (KERNEL - 1) + tap) * CHANNELS + channel, x, mask=there)
    x = _input(row, projected, ring, states, channel, there, stride, ring_rows, CHANNELS, GATED)
    total += x.to(tl.float32) * tl.load(weight + channel * KERNEL + KERNEL - 1, mask=there, other=0.0).to(
        tl.float32
    )
    place = tl.load(ring_to + row).to(tl.int64)
    if place >= 0:
        tl.store(ring + place * CHANNELS + channel, x, mask=there)
    if BIAS:
        total += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    return total


@kernel(do_not_specialize=("ring_rows",))
def _gated_convolution(
    projected, windows, ring_to, state_to, ring, states, weight, bias, out, ring_rows,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    total = _convolved(
        row, projected, windows, ring_to, state_to, ring, states, weight, bias, channel, there, 3 * CHANNELS,
        ring_rows, CHANNELS, KERNEL, BIAS, True,
    )  # fmt: skip
    after = tl.load(projected + (3 * row + 1) * CHANNELS + channel, mask=there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + row * CHANNELS + channel, (after * total.to(kind).to(tl.float32)).to(kind), mask=there)


def gated_convolution(
    projected: Tensor, inputs: Inputs, weight: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """LFM2: the convolution of before * x, times after; projected [rows, before + after + x], out [rows, width]."""
    rows, width = out.shape
    block = min(CHANNELS_AT_ONCE, triton.next_power_of_2(width))
    _gated_convolution[(rows, triton.cdiv(width, block))](
        projected, *inputs, weight, weight if bias is None else bias, out, len(inputs.ring),
        CHANNELS=width, KERNEL=weight.shape[1], BIAS=bias is not None, BLOCK=block, **ahead(out),
    )  # fmt: skip
    return out


@kernel(do_not_specialize=("ring_rows",))
def _convolve(
    projected, windows, ring_to, state_to, ring, states, weight, bias, queries, keys, values, ring_keys, stride,
    ring_rows, eps,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, KERNEL: tl.constexpr, BIAS: tl.constexpr,
    DELTA: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, KEY_PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Convolve HEADS heads of queries and keys of one row, or as many values."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width: tl.constexpr = KEY_HEADS * KEY_DIM
    channels: tl.constexpr = 2 * width + VALUES
    has_keys = part < KEY_PARTS
    head = (part * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    value = (head - KEY_PARTS * HEADS) * BLOCK + i
    # The delta rule has queries, keys, values; Mamba-2 has values, keys, queries.
    first_value: tl.constexpr = 2 * width if DELTA else 0
    first_key: tl.constexpr = 0 if DELTA else VALUES
    channel = tl.where(has_keys, first_key + head * KEY_DIM + i, first_value + value)
    there = tl.where(has_keys, (head < 2 * KEY_HEADS) & (i < KEY_DIM), (value < VALUES) & (value >= 0))
    total = _convolved(
        row, projected, windows, ring_to, state_to, ring, states, weight, bias, channel, there, stride, ring_rows,
        channels, KERNEL, BIAS, False,
    )  # fmt: skip
    x = tl.where(there, total / (1.0 + tl.exp(-total)), 0.0)
    kind = values.dtype.element_ty
    if has_keys:
        is_first = head < KEY_HEADS
        if DELTA:
            x = x * tl.rsqrt(tl.sum(x * x, axis=1) + eps)[:, None]
            x = tl.where(is_first, x * KEY_DIM**-0.5, x)
        of_head = tl.where(is_first, head, head - KEY_HEADS) * KEY_DIM + i
        is_query = is_first if DELTA else (head >= KEY_HEADS)
        is_key = (head >= KEY_HEADS) if DELTA else is_first
        tl.store(queries + row * width + of_head, x.to(kind), mask=there & is_query)
        tl.store(keys + row * width + of_head, x.to(kind), mask=there & is_key)
        place = tl.load(ring_to + row).to(tl.int64)
        if place >= 0:
            tl.store(ring_keys + place * width + of_head, x.to(kind), mask=there & is_key)
    else:
        tl.store(values + row * VALUES + value, x.to(kind), mask=there)


def convolve(
    projected: Tensor,
    inputs: Inputs,
    weight: Tensor,
    bias: Tensor | None,
    ring_keys: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    eps: float | None,
) -> None:
    """Convolve the leading channels of projected [rows, all], with silu, into queries, keys and values.

    Queries and keys [rows, key heads, key size] are normalised by the delta rule, which has an `eps`; keys are also
    written to ring_keys [ring rows, key heads, key size]. Values are [rows, heads * value size].
    """
    queries, keys, values = out
    rows, key_heads, key_dim = keys.shape
    block = triton.next_power_of_2(key_dim)
    heads = max(1, CHANNELS_AT_ONCE // block)
    key_parts = triton.cdiv(2 * key_heads, heads)
    _convolve[(rows, key_parts + triton.cdiv(values.shape[1], heads * block))](
        projected, *inputs, weight, weight if bias is None else bias, queries, keys, values, ring_keys,
        projected.shape[1], len(inputs.ring), eps or 0.0,
        KEY_HEADS=key_heads, KEY_DIM=key_dim, VALUES=values.shape[1], KERNEL=weight.shape[1], BIAS=bias is not None,
        DELTA=eps is not None, HEADS=heads, BLOCK=block, KEY_PARTS=key_parts, **ahead(values),
    )  # fmt: skip
