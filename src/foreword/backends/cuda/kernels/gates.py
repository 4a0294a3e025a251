"""Gates of recurrent layers and of gated attention: decays of rows, and gated outputs."""

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.dependent_launch import begin_kernel, pdl_options
from foreword.kernels.launching import kernel
from foreword.kv.chunks import CHUNK


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)); small results are exact to rounding, too.

    The quotient corrects the rounding of 1 + exp(x), as in common implementations of log1p.
    """
    e = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + e
    small = tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.where(x > 20.0, x, small)


@kernel(do_not_specialize=("min_step", "max_step"))
def _sum_decays(
    projected, rates, biases, positions, windows, ring_to, segment_first, segment_count, decays, ring_decays,
    strengths, stride, first_gate, min_step, max_step,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum the log decays of one segment's rows along the path to each row, row by row."""
    begin_kernel(PDL)
    segment = tl.program_id(0)
    first, count = tl.load(segment_first + segment).to(tl.int64), tl.load(segment_count + segment)
    head = tl.arange(0, BLOCK)
    mask = head < HEADS
    rate = -tl.exp(tl.load(rates + head, mask=mask, other=0.0))
    bias = tl.load(biases + head, mask=mask, other=0.0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in range(0, count):
        row = first + index
        gates = projected + row * stride + first_gate + head
        if DELTA:
            strength = _sigmoid(tl.load(gates, mask=mask, other=0.0).to(tl.float32))
            time_step = _softplus(tl.load(gates + HEADS, mask=mask, other=0.0).to(tl.float32) + bias)
        else:
            time_step = _softplus(tl.load(gates, mask=mask, other=0.0).to(tl.float32) + bias)
            time_step = tl.minimum(tl.maximum(time_step, min_step), max_step)
            strength = time_step
        is_chunk_start = tl.load(positions + row) % CHUNK == 0
        parent = tl.load(windows + row * TAPS + TAPS - 1).to(tl.int64)
        if is_chunk_start:
            total = tl.zeros((BLOCK,), dtype=tl.float32)
        elif parent < 0:
            total = tl.load(ring_decays + (-1 - parent) * HEADS + head, mask=mask, other=0.0)
        elif parent != row - 1:
            total = tl.load(decays + parent * HEADS + head, mask=mask, other=0.0)
        total += rate * time_step
        tl.store(decays + row * HEADS + head, total, mask=mask)
        tl.store(strengths + row * HEADS + head, strength, mask=mask)
        ring_row = tl.load(ring_to + row).to(tl.int64)
        if ring_row >= 0:
            tl.store(ring_decays + ring_row * HEADS + head, total, mask=mask)


def sum_decays(
    projected: Tensor,
    first_gate: int,
    weights: tuple[Tensor, Tensor],
    row_arrays: tuple[Tensor, Tensor, Tensor],
    segments: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor, Tensor],
    limits: tuple[float, float] | None,
) -> None:
    """Compute the sums of log decays since each row's chunk began, and the strength of its update.

    - `projected`: its columns from `first_gate` on are the gates.
    - `weights`: decay rates and time biases.
    - `row_arrays`: positions, convolution windows, and ring rows to write.
    - `segments`: first rows and counts.
    - `out`: decays of the pass, decays of the ring, and strengths, all float32 [rows, heads].
    - `limits`: minimum and maximum of Mamba-2's time steps; None: the gated delta rule.
    """
    heads = len(weights[0])
    _sum_decays[(len(segments[0]),)](
        projected, *weights, *row_arrays, *segments, *out, projected.shape[1], first_gate, *(limits or (0.0, 0.0)),
        HEADS=heads, BLOCK=triton.next_power_of_2(heads), TAPS=row_arrays[1].shape[1], DELTA=limits is None,
        CHUNK=CHUNK, num_warps=1, **pdl_options(projected),
    )  # fmt: skip


@kernel()
def _norm_and_gate(
    outputs, projected, weight, out, stride, first_gate, eps,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise and gate some heads, or groups of heads, of one row; GATE_FIRST: gate them first."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    mask = (head < HEADS) & (i < WIDTH)
    at = head * WIDTH + i
    dtype = out.dtype.element_ty
    gate = tl.load(projected + row * stride + first_gate + at, mask=mask, other=0.0).to(tl.float32)
    gate = gate * _sigmoid(gate)
    x = tl.load(outputs + row * HEADS * WIDTH + at, mask=mask, other=0.0)
    if GATE_FIRST:
        x = x * gate
    x = x.to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    gain = tl.load(weight + (at if GATE_FIRST else i + 0 * head), mask=mask, other=0.0).to(tl.float32)
    x = (gain * (x * scale).to(dtype).to(tl.float32)).to(dtype)
    if not GATE_FIRST:
        x = (x.to(tl.float32) * gate).to(dtype)
    tl.store(out + row * HEADS * WIDTH + at, x, mask=mask)


def norm_and_gate(
    outputs: Tensor,
    projected: Tensor,
    first_gate: int,
    weight: Tensor,
    eps: float,
    groups: int | None,
    out: Tensor,
) -> Tensor:
    """Normalise `outputs` [rows, values], multiply them with silu of the gates in `projected`, and write them to `out`.

    Each head is normalised, then gated. With `groups` (Mamba-2), all heads are gated, then each group is normalised.
    """
    width = len(weight) if groups is None else len(weight) // groups
    block, heads = triton.next_power_of_2(width), out.shape[1] // width
    head_block = 4 if block <= 256 else 1  # one warp for each
    _norm_and_gate[(len(outputs), triton.cdiv(heads, head_block))](
        outputs, projected, weight, out, projected.shape[1], first_gate, eps,
        HEADS=heads, HEAD_BLOCK=head_block, WIDTH=width, BLOCK=block, GATE_FIRST=groups is not None,
        num_warps=4 if block <= 2048 else 8, **pdl_options(out),
    )  # fmt: skip
    return out


@kernel()
def _gate_heads(
    attended, qkv, out, stride, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Multiply one row's values with their gates. In qkv, each head has its query, and then its gate."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < HEADS * DIM
    gate_at = qkv + row * stride + (2 * (at // DIM) + 1) * DIM + at % DIM
    gate = _sigmoid(tl.load(gate_at, mask=mask, other=0.0).to(tl.float32))
    x = tl.load(attended + row * HEADS * DIM + at, mask=mask, other=0.0).to(tl.float32) * gate
    tl.store(out + row * HEADS * DIM + at, x.to(out.dtype.element_ty), mask=mask)


def gate_heads(attended: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    """Write attended [rows, heads, dim] times the sigmoid of its gates to `out`; a gate follows its query in qkv."""
    rows, heads, dim = attended.shape
    block = min(1024, triton.next_power_of_2(heads * dim))
    _gate_heads[(rows, triton.cdiv(heads * dim, block))](
        attended, qkv, out, qkv.shape[1], HEADS=heads, DIM=dim, BLOCK=block, **pdl_options(out)
    )
    return out
