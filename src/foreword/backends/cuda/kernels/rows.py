"""Small kernels over whole rows: embedding, norms, activation, logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.dependent_launch import begin_kernel, pdl_options
from foreword.backends.cuda.kernels.fp8 import (
    Fp8Rows,
    arrays_of,
    padded_width,
    row_warps,
    scale_group,
    store_rounded,
)
from foreword.backends.cuda.kernels.functions import activated, tanh
from foreword.kernels.launching import kernel
from foreword.kernels.recording import is_recording


@kernel(do_not_specialize=("rows",))
def _fill_in(token_ids, drawn, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row, mask=row < rows, other=0)
    is_pending = (row < rows) & (token < 0)
    drawn_token = tl.load(drawn + (-1 - token), mask=is_pending, other=0)
    tl.store(token_ids + row, tl.maximum(drawn_token, 0).to(tl.int32), mask=is_pending)


def fill_in(token_ids: Tensor, drawn: Tensor) -> None:
    """Replace, in place, ids that refer to tokens of the previous pass by these tokens; see `batch.resolve_ids`."""
    _fill_in[(triton.cdiv(len(token_ids), 256),)](token_ids, drawn, len(token_ids), BLOCK=256)
    if is_recording():
        # While launches are only recorded, Triton kernels do not run, but torch operations do, and need valid ids.
        token_ids.clamp_(min=0)


@triton.jit
def _sum_of_parts(
    parts, num_rows, row, columns, mask, WIDTH: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr
):
    """Return the sum of one row of float32 parts [PARTS, rows, width], added in order, then rounded to `dtype`."""
    total = tl.load(parts + row * WIDTH + columns, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + (part * num_rows + row) * WIDTH + columns, mask=mask, other=0.0)
    return total.to(dtype)


@kernel(do_not_specialize=("num_rows",))
def _add_norm(
    stream, delta, bias, delta_norm, weight, out, values, scales, num_rows, eps, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr,
    DELTA_NORMED: tl.constexpr, SCALED: tl.constexpr, NORMED: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x = tl.load(stream + row * WIDTH + columns, mask=mask, other=0.0)
    if ADDS:
        if PARTS > 0:
            addend = _sum_of_parts(delta, num_rows, row, columns, mask, WIDTH, PARTS, tl.float32)
            if BIASED:
                addend += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
            addend = addend.to(x.dtype)
        else:
            addend = tl.load(delta + row * WIDTH + columns, mask=mask, other=0.0)
        if DELTA_NORMED:
            addend = _normed(addend, delta_norm, eps, columns, mask, WIDTH)
        if SCALED:
            addend = (addend.to(tl.float32) * scale).to(x.dtype)
        x = x.to(tl.float32) + addend.to(tl.float32)
        x = x.to(stream.dtype.element_ty)
        tl.store(stream + row * WIDTH + columns, x, mask=mask)
    if NORMED:
        x = _normed(x, weight, eps, columns, mask, WIDTH)
        tl.store(out + row * WIDTH + columns, x, mask=mask)
    if GROUP > 0:
        store_rounded(x, values, scales, row, columns, mask, WIDTH, BLOCK, GROUP)


@triton.jit
def _normed(x, weight, eps, columns, mask, WIDTH: tl.constexpr):
    """Return the RMS norm of one row, times `weight`."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    return tl.load(weight + columns, mask=mask, other=0.0) * (wide * scale).to(x.dtype)


def add_norm(
    stream: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    rounded: Fp8Rows | None = None,
    delta_norm: Tensor | None = None,
    scale: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Add `delta` to `stream` [rows, hidden] in place and return the RMS norm of the sum, times `weight`.

    `delta` is [rows, hidden], or a product in parts, float32 [parts, rows, hidden], to which its `bias` is still to be
    added. Before it is added, `delta` is normalised with the weights `delta_norm`, if given, and multiplied by `scale`.
    The norm is written to `out`; with an empty `weight` there is none, and the stream itself is returned. `rounded`
    receives the result in 8 bits.
    """
    rows, width = stream.shape
    block = padded_width(width, rounded)
    parts = len(delta) if delta is not None and delta.ndim == 3 else 0
    is_normed = len(weight) > 0
    if delta is not None or is_normed or rounded is not None:
        # Absent tensors are replaced by `stream`, which the kernel then does not read in their place.
        _add_norm[(rows,)](
            stream, stream if delta is None else delta, stream if bias is None else bias,
            stream if delta_norm is None else delta_norm, weight, out, *arrays_of(rounded, out), rows, eps, scale,
            WIDTH=width, BLOCK=block, ADDS=delta is not None, PARTS=parts, BIASED=bias is not None and parts > 0,
            DELTA_NORMED=delta_norm is not None, SCALED=scale != 1, NORMED=is_normed,
            GROUP=scale_group(rounded, block), num_warps=4 if block <= 2048 else 8, **pdl_options(stream),
        )  # fmt: skip
    return out if is_normed else stream


@kernel()
def _norm_heads(
    qkv, query_norm, key_norm, stride, eps,
    QUERY: tl.constexpr, KEY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        at, mask = qkv + row * stride + columns, columns < QUERY
        x = tl.load(at, mask=mask, other=0.0)
        tl.store(at, _normed(x, query_norm, eps, columns, mask, QUERY), mask=mask)
    else:
        at, mask = qkv + row * stride + QUERY + columns, columns < KEY
        x = tl.load(at, mask=mask, other=0.0)
        tl.store(at, _normed(x, key_norm, eps, columns, mask, KEY), mask=mask)


def norm_heads(qkv: Tensor, norms: tuple[Tensor, Tensor], eps: float) -> None:
    """Normalise all query heads of a row together, and all its key heads together, in place: qkv [rows, q + k + v]."""
    widths = len(norms[0]), len(norms[1])
    block = triton.next_power_of_2(max(widths))
    _norm_heads[(len(qkv), 2)](
        qkv, *norms, qkv.shape[1], eps,
        QUERY=widths[0], KEY=widths[1], BLOCK=block, num_warps=4 if block <= 2048 else 8, **pdl_options(qkv),
    )  # fmt: skip


@kernel(do_not_specialize=("num_rows",))
def _join_parts(
    parts, bias, out, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    dtype: tl.constexpr = tl.float32 if HAS_BIAS else out.dtype.element_ty
    total = _sum_of_parts(parts, num_rows, row, columns, mask, WIDTH, PARTS, dtype)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=mask)


def join_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write the sum of a product's parts, float32 [parts, rows, width], plus the bias to out [rows, width]."""
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    _join_parts[(rows, triton.cdiv(width, block))](
        parts, parts if bias is None else bias, out, rows,
        WIDTH=width, BLOCK=block, PARTS=len(parts), HAS_BIAS=bias is not None,
    )  # fmt: skip
    return out


@kernel(do_not_specialize=("num_rows",))
def _gate_shared_expert(
    shared, normed, gate, out, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    total = _sum_of_parts(shared, num_rows, row, columns, mask, WIDTH, PARTS, tl.float32)
    if GATED:
        x = tl.load(normed + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        logit = tl.sum(x * tl.load(gate + columns, mask=mask, other=0.0).to(tl.float32), axis=0)
        total = total / (1.0 + tl.exp(-logit))
    tl.store(out + row * WIDTH + columns, total, mask=mask)


def gate_shared_expert(shared: Tensor, normed: Tensor, gate: Tensor | None, out: Tensor) -> Tensor:
    """Write the shared expert's output `shared`, times sigmoid(normed @ gate), to `out`, float32, and return `out`.

    `shared` is [rows, hidden] or a product in parts, `gate` [1, hidden]. Without a gate, `shared` is only converted.
    """
    rows, width = out.shape
    block = triton.next_power_of_2(width)
    _gate_shared_expert[(rows,)](
        shared, normed, normed if gate is None else gate, out, rows,
        WIDTH=width, BLOCK=block, PARTS=len(shared) if shared.ndim == 3 else 1, GATED=gate is not None,
        num_warps=4 if block <= 2048 else 8, **pdl_options(out),
    )  # fmt: skip
    return out


@kernel()
def _activate(
    projected, out, values, scales,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    at = projected + row * (2 if GATED else 1) * WIDTH + columns
    first = tl.load(at, mask=mask, other=0.0)
    active = activated(first.to(tl.float32), ACTIVATION).to(first.dtype)
    if GATED:
        active *= tl.load(at + WIDTH, mask=mask, other=0.0)
    tl.store(out + row * WIDTH + columns, active, mask=mask)
    if GROUP > 0:
        store_rounded(active, values, scales, row, columns, mask, WIDTH, BLOCK, GROUP)


def activate(
    projected: Tensor, out: Tensor, rounded: Fp8Rows | None = None, activation: str = "silu"
) -> Tensor:
    """Write an MLP's activation to out [rows, width] and return it.

    That is activation(gate) * up of projected [rows, 2 width], or activation(up) of projected [rows, width], which has
    no gate. `rounded` receives the result in 8 bits.
    """
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width)) if rounded is None else padded_width(width, rounded)
    _activate[(rows, triton.cdiv(width, block))](
        projected, out, *arrays_of(rounded, out),
        WIDTH=width, BLOCK=block, GATED=projected.shape[1] > width, ACTIVATION=activation,
        GROUP=scale_group(rounded, block), num_warps=row_warps(block), **pdl_options(out),
    )  # fmt: skip
    return out


@kernel()
def _take_rows(source, rows, out, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    numbers = tl.load(source + row * WIDTH + columns, mask=mask)
    if SCALED:
        numbers = (numbers.to(tl.float32) * scale).to(numbers.dtype)
    tl.store(out + index * WIDTH + columns, numbers, mask=mask)


def take_rows(source: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    """Return a copy of the rows of source [rows, width] with these indices, times `scale`."""
    width = source.shape[1]
    out = source.new_empty((len(rows), width))
    _take_rows[(len(rows),)](
        source, rows, out, scale, WIDTH=width, BLOCK=triton.next_power_of_2(width), SCALED=scale != 1
    )
    return out


@kernel(do_not_specialize=("count",))
def _as_logits(
    numbers, out, count, scale, cap, BLOCK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(numbers + at, mask=at < count).to(tl.float32)
    if SCALED:
        logits *= scale
    if CAPPED:
        logits = tanh(logits / cap) * cap
    tl.store(out + at, logits, mask=at < count)


def as_logits(numbers: Tensor, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """Return a float32 copy of the numbers, times `scale`, soft-capped at `softcap` if given (tanh)."""
    out = torch.empty(numbers.shape, dtype=torch.float32, device=numbers.device)
    _as_logits[(triton.cdiv(numbers.numel(), 4096),)](
        numbers, out, numbers.numel(), scale, softcap or 1.0,
        BLOCK=4096, SCALED=scale != 1, CAPPED=softcap is not None, num_warps=8,
    )  # fmt: skip
    return out
