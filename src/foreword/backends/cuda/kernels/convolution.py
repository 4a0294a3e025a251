"""Short convolutions of recurrent layers, over the inputs of each row's newest ancestors.

An input is read from this pass, from the request's ring, or from the state before its chunk: see `ConvolutionInputs`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.dependent_launch import begin_kernel, pdl_options
from foreword.kernels.launching import kernel

CHANNELS_AT_ONCE = 512
"""Channels of a row that one program convolves; at least one head."""


class ConvolutionInputs(NamedTuple):
    """Memory and indices of the inputs of one layer's convolution."""

    # int32 [rows, kernel - 1], oldest first: a row of this pass, or -1 - i for stored input i. Stored inputs are
    # numbered through the rows of `ring`, then through the inputs of `states`.
    windows: Tensor
    ring_to: Tensor  # int32 [rows], ring row to write; -1: none
    state_to: Tensor  # int32 [rows], state to write: it receives the inputs of the row's window; -1: none
    ring: Tensor  # [ring rows, channels]
    states: Tensor  # [states, kernel - 1, channels]


@triton.jit
def _load_input(
    source, projected, ring, states, channel, mask, stride, ring_rows, CHANNELS, GATED: tl.constexpr
):
    """Load the input at `source`, an entry of a window; GATED: it is the product of the row's first and last third."""
    # Without branches, so that the loads of all inputs are in flight together.
    source = source + 0 * channel
    index = -1 - source
    is_row, in_ring, in_state = index < 0, (index >= 0) & (index < ring_rows), index >= ring_rows
    at = projected + source * stride + channel
    x = tl.load(at, mask=mask & is_row, other=0.0)
    if GATED:
        other = tl.load(at + 2 * CHANNELS, mask=mask & is_row, other=0.0)
        x = (x.to(tl.float32) * other.to(tl.float32)).to(x.dtype)
    ring_x = tl.load(ring + index * CHANNELS + channel, mask=mask & in_ring, other=0.0)
    state_at = states + (index - ring_rows) * CHANNELS + channel
    state_x = tl.load(state_at, mask=mask & in_state, other=0.0)
    return tl.where(is_row, x, tl.where(in_ring, ring_x, state_x))


@triton.jit
def _convolved(
    row, projected, windows, ring_to, state_to, ring, states, weight, bias, channel, mask, stride, ring_rows,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return one row's convolution in float32, summed from old to new; store its inputs in ring and state."""
    slot = tl.load(state_to + row).to(tl.int64)
    total = tl.zeros(channel.shape, dtype=tl.float32)
    for tap in tl.static_range(KERNEL - 1):
        source = tl.load(windows + row * (KERNEL - 1) + tap).to(tl.int64)
        x = _load_input(source, projected, ring, states, channel, mask, stride, ring_rows, CHANNELS, GATED)
        total += x.to(tl.float32) * tl.load(weight + tap * CHANNELS + channel, mask=mask, other=0.0).to(
            tl.float32
        )
        tl.store(
            states + (slot * (KERNEL - 1) + tap) * CHANNELS + channel,
            x,
            mask=mask & (slot + 0 * channel >= 0),
        )
    x = _load_input(row, projected, ring, states, channel, mask, stride, ring_rows, CHANNELS, GATED)
    total += x.to(tl.float32) * tl.load(weight + (KERNEL - 1) * CHANNELS + channel, mask=mask, other=0.0).to(
        tl.float32
    )
    ring_row = tl.load(ring_to + row).to(tl.int64)
    tl.store(ring + ring_row * CHANNELS + channel, x, mask=mask & (ring_row + 0 * channel >= 0))
    if BIAS:
        total += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    return total


@kernel(do_not_specialize=("ring_rows",))
def _gated_convolution(
    projected, windows, ring_to, state_to, ring, states, weight, bias, out, ring_rows,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    total = _convolved(
        row, projected, windows, ring_to, state_to, ring, states, weight, bias, channel, mask, 3 * CHANNELS,
        ring_rows, CHANNELS, KERNEL, BIAS, True,
    )  # fmt: skip
    output_gate = tl.load(projected + (3 * row + 1) * CHANNELS + channel, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(
        out + row * CHANNELS + channel, (output_gate * total.to(dtype).to(tl.float32)).to(dtype), mask=mask
    )


def gated_convolution(
    projected: Tensor, inputs: ConvolutionInputs, weight: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """Write LFM2's gated convolution to out [rows, width]: the convolution of input gate * x, times the output gate.

    `projected` [rows, 3 * width] has the columns of input gate, output gate and x, in this order.
    """
    rows, width = out.shape
    block = min(CHANNELS_AT_ONCE, triton.next_power_of_2(width))
    _gated_convolution[(rows, triton.cdiv(width, block))](
        projected, *inputs, weight, weight if bias is None else bias, out, len(inputs.ring),
        CHANNELS=width, KERNEL=len(weight), BIAS=bias is not None, BLOCK=block, **pdl_options(out),
    )  # fmt: skip
    return out


@kernel(do_not_specialize=("ring_rows",))
def _convolve(
    projected, windows, ring_to, state_to, ring, states, weight, bias, queries, keys, values, ring_keys, stride,
    ring_rows, eps,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, KERNEL: tl.constexpr, BIAS: tl.constexpr,
    DELTA: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, KEY_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For one row, convolve HEADS heads of queries and keys, or HEADS * BLOCK values."""
    begin_kernel(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width: tl.constexpr = KEY_HEADS * KEY_DIM
    channels: tl.constexpr = 2 * width + VALUES
    has_queries_or_keys = part < KEY_PARTS
    head = (part * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    value = (head - KEY_PARTS * HEADS) * BLOCK + i
    # The delta rule has queries, keys, values; Mamba-2 has values, keys, queries.
    first_value: tl.constexpr = 2 * width if DELTA else 0
    first_query_or_key: tl.constexpr = 0 if DELTA else VALUES
    channel = tl.where(has_queries_or_keys, first_query_or_key + head * KEY_DIM + i, first_value + value)
    mask = tl.where(
        has_queries_or_keys, (head < 2 * KEY_HEADS) & (i < KEY_DIM), (value < VALUES) & (value >= 0)
    )
    total = _convolved(
        row, projected, windows, ring_to, state_to, ring, states, weight, bias, channel, mask, stride, ring_rows,
        channels, KERNEL, BIAS, False,
    )  # fmt: skip
    x = tl.where(mask, total / (1.0 + tl.exp(-total)), 0.0)
    dtype = values.dtype.element_ty
    if has_queries_or_keys:
        is_first = head < KEY_HEADS
        if DELTA:
            x = x * tl.rsqrt(tl.sum(x * x, axis=1) + eps)[:, None]
            x = tl.where(is_first, x * KEY_DIM**-0.5, x)
        of_head = tl.where(is_first, head, head - KEY_HEADS) * KEY_DIM + i
        is_query = is_first if DELTA else (head >= KEY_HEADS)
        is_key = (head >= KEY_HEADS) if DELTA else is_first
        tl.store(queries + row * width + of_head, x.to(dtype), mask=mask & is_query)
        tl.store(keys + row * width + of_head, x.to(dtype), mask=mask & is_key)
        ring_row = tl.load(ring_to + row).to(tl.int64)
        if ring_row >= 0:
            tl.store(ring_keys + ring_row * width + of_head, x.to(dtype), mask=mask & is_key)
    else:
        tl.store(values + row * VALUES + value, x.to(dtype), mask=mask)


def convolve(
    projected: Tensor,
    inputs: ConvolutionInputs,
    weight: Tensor,
    bias: Tensor | None,
    ring_keys: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    eps: float | None,
) -> None:
    """Write silu of the convolution of projected's leading channels to `out`: queries, keys and values.

    Queries and keys are [rows, key heads, key size], values [rows, heads * value size]. With an `eps` (the delta rule),
    queries and keys are normalised. Keys are also written to ring_keys [ring rows, key heads, key size].
    """
    queries, keys, values = out
    rows, key_heads, key_dim = keys.shape
    block = triton.next_power_of_2(key_dim)
    heads = max(1, CHANNELS_AT_ONCE // block)
    key_parts = triton.cdiv(2 * key_heads, heads)
    _convolve[(rows, key_parts + triton.cdiv(values.shape[1], heads * block))](
        projected, *inputs, weight, weight if bias is None else bias, queries, keys, values, ring_keys,
        projected.shape[1], len(inputs.ring), eps or 0.0,
        KEY_HEADS=key_heads, KEY_DIM=key_dim, VALUES=values.shape[1], KERNEL=len(weight), BIAS=bias is not None,
        DELTA=eps is not None, HEADS=heads, BLOCK=block, KEY_PARTS=key_parts, **pdl_options(values),
    )  # fmt: skip
