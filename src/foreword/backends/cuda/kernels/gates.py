"""Gates of recurrent layers and of gated attention: decays of rows, and gated outputs."""

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.ahead import (
    ahead,
    let_the_next_kernel_come,
    wait_for_the_kernel_before,
)
from foreword.kernels.launching import kernel
from foreword.kv.chunks import CHUNK


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), exact to rounding for small results, too."""
    e = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + e
    small = tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.where(x > 20.0, x, small)


@kernel(do_not_specialize=("least", "most"))
def _sum_decays(
    projected, rates, biases, positions, windows, ring_to, segment_first, segment_count, decays, ring_decays,
    strengths, stride, first_gate, least, most,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Sum the log decays of one segment's rows along their paths, one after the other."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    segment = tl.program_id(0)
    first, count = tl.load(segment_first + segment).to(tl.int64), tl.load(segment_count + segment)
    head = tl.arange(0, BLOCK)
    there = head < HEADS
    rate = -tl.exp(tl.load(rates + head, mask=there, other=0.0))
    bias = tl.load(biases + head, mask=there, other=0.0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(0, count):
        row = first + place
        gates = projected + row * stride + first_gate + head
        if DELTA:
            strength = _sigmoid(tl.load(gates, mask=there, other=0.0).to(tl.float32))
            step = _softplus(tl.load(gates + HEADS, mask=there, other=0.0).to(tl.float32) + bias)
        else:
            step = _softplus(tl.load(gates, mask=there, other=0.0).to(tl.float32) + bias)
            step = tl.minimum(tl.maximum(step, least), most)
            strength = step
        begins = tl.load(positions + row) % CHUNK == 0
        parent = tl.load(windows + row * TAPS + TAPS - 1).to(tl.int64)
        if begins:
            total = tl.zeros((BLOCK,), dtype=tl.float32)
        elif parent < 0:
            total = tl.load(ring_decays + (-1 - parent) * HEADS + head, mask=there, other=0.0)
        elif parent != row - 1:
            total = tl.load(decays + parent * HEADS + head, mask=there, other=0.0)
        total += rate * step
        tl.store(decays + row * HEADS + head, total, mask=there)
        tl.store(strengths + row * HEADS + head, strength, mask=there)
        to = tl.load(ring_to + row).to(tl.int64)
        if to >= 0:
            tl.store(ring_decays + to * HEADS + head, total, mask=there)


def sum_decays(
    projected: Tensor,
    first_gate: int,
    weights: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor, Tensor],
    segments: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor, Tensor],
    limits: tuple[float, float] | None,
) -> None:
    """Compute the sums of log decays since each row's chunk began, and the strength of its update.

    The gates are columns of `projected` from `first_gate` on; `weights` are decay rates and time biases; `places` are
    positions, windows and ring rows; `segments` first rows and counts; `out` decays, the ring's, and strengths, all
    float32 [rows, heads]. `limits` are of Mamba-2's time steps; None: the gated delta rule.
    """
    heads = len(weights[0])
    _sum_decays[(len(segments[0]),)](
        projected, *weights, *places, *segments, *out, projected.shape[1], first_gate, *(limits or (0.0, 0.0)),
        HEADS=heads, BLOCK=triton.next_power_of_2(heads), TAPS=places[1].shape[1], DELTA=limits is None, CHUNK=CHUNK,
        num_warps=1, **ahead(projected),
    )  # fmt: skip


@kernel()
def _norm_and_gate(
    read, projected, weight, out, stride, first_gate, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Normalise one head, or group of heads, of one row: before it is gated, or after."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    there = i < WIDTH
    at = head * WIDTH + i
    kind = out.dtype.element_ty
    gate = tl.load(projected + row * stride + first_gate + at, mask=there, other=0.0).to(tl.float32)
    gate = gate * _sigmoid(gate)
    x = tl.load(read + row * HEADS * WIDTH + at, mask=there, other=0.0)
    if GATE_FIRST:
        x = x * gate
        weight += head * WIDTH
    x = x.to(kind).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    x = (tl.load(weight + i, mask=there, other=0.0).to(tl.float32) * (x * scale).to(kind).to(tl.float32)).to(
        kind
    )
    if not GATE_FIRST:
        x = (x.to(tl.float32) * gate).to(kind)
    tl.store(out + row * HEADS * WIDTH + at, x, mask=there)


def norm_and_gate(
    read: Tensor,
    projected: Tensor,
    first_gate: int,
    weight: Tensor,
    eps: float,
    groups: int | None,
    out: Tensor,
) -> Tensor:
    """Normalise read [rows, values] and multiply it with silu of the gates in `projected`, into out.

    Each head is normalised, then gated; or with `groups` (Mamba-2), gated, then each group is normalised.
    """
    width = len(weight) if groups is None else len(weight) // groups
    block = triton.next_power_of_2(width)
    _norm_and_gate[(len(read), out.shape[1] // width)](
        read, projected, weight, out, projected.shape[1], first_gate, eps,
        HEADS=out.shape[1] // width, WIDTH=width, BLOCK=block, GATE_FIRST=groups is not None,
        num_warps=1 if block <= 256 else 4 if block <= 2048 else 8, **ahead(out),
    )  # fmt: skip
    return out


@kernel()
def _gate_heads(
    seen, qkv, out, stride, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < HEADS * DIM
    gate_at = qkv + row * stride + (2 * (at // DIM) + 1) * DIM + at % DIM
    gate = _sigmoid(tl.load(gate_at, mask=there, other=0.0).to(tl.float32))
    x = tl.load(seen + row * HEADS * DIM + at, mask=there, other=0.0).to(tl.float32) * gate
    tl.store(out + row * HEADS * DIM + at, x.to(out.dtype.element_ty), mask=there)


def gate_heads(seen: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    """Multiply seen [rows, heads, dim] with the sigmoid of its gates, which follow the queries in qkv, into out."""
    rows, heads, dim = seen.shape
    block = min(1024, triton.next_power_of_2(heads * dim))
    _gate_heads[(rows, triton.cdiv(heads * dim, block))](
        seen, qkv, out, qkv.shape[1], HEADS=heads, DIM=dim, BLOCK=block, **ahead(out)
    )
    return out
