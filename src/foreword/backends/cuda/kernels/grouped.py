"""Matrix products with 4-bit or int8 weights that have a scale for every group along K.

Operands are swapped: weights are the M side of the tensor cores (at least 64 wide), the rows of a pass are the N side.
Unpacked weights come from registers; only with the operands swapped do all tile sizes then give the same bits.

Codes become integers, which bf16 represents exactly; a group's sum is multiplied by its scale in float32. Groups are
added in order, or in parts as in `linear`. A group's minimum (`mins`) is multiplied by the sum of the group's inputs,
which is computed once per row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.dependent_launch import (
    begin_kernel,
    launch_dependents,
    pdl_options,
    wait_for_previous_kernel,
)
from foreword.backends.cuda.kernels.linear import Tile, precision_of, product_grid
from foreword.kernels.launching import kernel

INT4, E2M1, INT8 = range(3)
"""Kinds of codes: integers from 0 to 15 with a zero point; 4-bit floats (MXFP4); integers from -128 to 127."""

_GROUPS = 64
"""Groups of a row whose sums one program computes."""


@dataclass(frozen=True)
class GroupedWeight:
    """A matrix [N, K] of codes, stored group by group, so that a tile of weights is contiguous."""

    # uint8 [K / group, N, group / 2]: a byte has the entries j and j + group / 2 of a group; INT8: int8 [.., group]
    codes: Tensor
    scales: Tensor  # float32 or float16 [K / group, N]
    zeros: Tensor | None  # uint8 [K / group, N], zero points; None: all are 8
    # int32 [K], the entry of the input that each column reads; None: column k reads entry k
    order: Tensor | None
    kind: int = INT4  # or E2M1, INT8
    # Shaped as `scales`, subtracted from all numbers of a group; the codes' zero point is then 0.
    mins: Tensor | None = None

    @property
    def group(self) -> int:
        """Entries of K with one scale."""
        return self.codes.shape[2] * (1 if self.kind == INT8 else 2)

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return torch.Size((self.codes.shape[1], len(self.codes) * self.group))

    def __len__(self) -> int:
        return self.codes.shape[1]

    def __getitem__(self, rows: slice) -> "GroupedWeight":
        """Return some rows, as a view."""
        parts = (self.codes, self.scales, self.zeros, self.mins)
        codes, scales, zeros, mins = (part if part is None else part[:, rows] for part in parts)
        assert codes is not None and scales is not None
        return GroupedWeight(codes, scales, zeros, self.order, self.kind, mins)

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales, zeros, order and mins."""
        parts = (self.codes, self.scales, self.zeros, self.order, self.mins)
        return sum(part.nbytes for part in parts if part is not None)


@triton.jit
def _decoded(codes, zeros_plus_128, dtype, KIND: tl.constexpr):
    """Convert 4-bit codes of a KIND to `dtype`: integers minus their zero points, or twice the value of E2M1 codes."""
    if KIND == 1:
        # The table 0, 1, 2, 3, 4, 6, 8, 12 packed into one word; the highest bit of a code is the sign.
        wide = codes.to(tl.int64)
        size = (0xC8643210 >> ((wide & 7) * 4)) & 15
        number = (size.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True).to(dtype) - 128
        return tl.where((wide & 8) != 0, -number, number)
    # This bf16 is 128 + code: 128 has the bits 0x4300, and the code is in the low bits of the mantissa.
    return (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True).to(dtype) - zeros_plus_128


@kernel(do_not_specialize=("num_rows",))
def _grouped_linear(
    x, codes, scales, zeros, mins, sums, bias, y, num_rows, N, K, stride, part_depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, MINS: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[part, m, n] = sum over the part's groups of scale[n] times the sum over k of x[m, k] code[n, k], + bias[n].

    `stride` is the number of columns of a group in memory; N of them belong to this matrix, which may be a slice.
    """
    early: tl.constexpr = ROWS > 16
    launch_dependents(PDL and early)
    wait_for_previous_kernel(PDL)
    width: tl.constexpr = GROUP if KIND == 2 else GROUP // 2
    dtype = x.dtype.element_ty
    tiles_of_rows = tl.cdiv(num_rows, ROWS)
    row_tile = tl.program_id(0) % tiles_of_rows
    column_tile = tl.program_id(0) // tiles_of_rows
    part = tl.program_id(1)
    begin = part * part_depth
    m = row_tile * ROWS + tl.arange(0, ROWS)
    n = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, width)
    row_mask, column_mask = m < num_rows, n < N
    x_at = x + m.to(tl.int64)[:, None] * K + begin + k[None, :]
    of_group = (begin // GROUP).to(tl.int64) * stride + n
    codes_at = codes + of_group[:, None] * width + k[None, :]
    sums_at = sums + m.to(tl.int64) * (K // GROUP) + begin // GROUP
    zero = tl.full((COLUMNS,), 128.0 if MINS else 136.0, dtype=dtype)
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for _ in range(begin, tl.minimum(begin + part_depth, K), GROUP):
        packed = tl.load(codes_at, mask=column_mask[:, None], other=0)
        scale = tl.load(scales + of_group, mask=column_mask, other=0.0).to(tl.float32)
        if ZEROS:
            zero = tl.load(zeros + of_group, mask=column_mask, other=0).to(dtype) + 128
        a = tl.load(x_at, mask=row_mask[:, None], other=0.0)
        if KIND == 2:
            group_sum = tl.dot(packed.to(dtype), tl.trans(a), input_precision=PRECISION)
        else:
            b = tl.load(x_at + width, mask=row_mask[:, None], other=0.0)
            low = _decoded(packed & 15, zero[:, None], dtype, KIND)
            high = _decoded(packed >> 4, zero[:, None], dtype, KIND)
            group_sum = tl.dot(low, tl.trans(a), input_precision=PRECISION)
            group_sum = tl.dot(high, tl.trans(b), group_sum, input_precision=PRECISION)
        total = tl.fma(group_sum, tl.broadcast_to(scale[:, None], group_sum.shape), total)
        if MINS:
            least = tl.load(mins + of_group, mask=column_mask, other=0.0).to(tl.float32)
            inputs = tl.load(sums_at, mask=row_mask, other=0.0)
            below = tl.broadcast_to(-least[:, None], total.shape)
            total = tl.fma(below, tl.broadcast_to(inputs[None, :], total.shape), total)
            sums_at += 1
        x_at += GROUP
        of_group += stride
        codes_at += stride * width
    launch_dependents(PDL and not early)
    total = tl.trans(total)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    y_at = y + (part.to(tl.int64) * num_rows + m.to(tl.int64))[:, None] * N + n[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


def grouped_linear(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    part_depth: int | None = None,
) -> Tensor:
    """Write x [rows, K] times weight [N, K] to out [rows, N]; in parts as `linear`.

    The columns of x must already be in the order `weight.order` (`take_columns`).
    """
    (num_rows, depth), columns, scales = x.shape, len(weight), weight.scales
    part_depth = part_depth or depth
    _grouped_linear[product_grid(num_rows, columns, depth, tile, part_depth)](
        x, weight.codes, scales, scales if weight.zeros is None else weight.zeros,
        *((scales, scales) if weight.mins is None else (weight.mins, group_sums(x, weight.group))),
        scales if bias is None else bias, out, num_rows, columns, depth, scales.stride(0), part_depth,
        ROWS=tile.rows, COLUMNS=tile.columns, GROUP=weight.group, KIND=weight.kind, ZEROS=weight.zeros is not None,
        MINS=weight.mins is not None, HAS_BIAS=bias is not None, PRECISION=precision_of(x),
        num_warps=tile.warps, num_stages=tile.stages, **pdl_options(x),
    )  # fmt: skip
    return out


@kernel()
def _group_sums(x, out, WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr):
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    mask = group < WIDTH // GROUP
    numbers = tl.load(
        x + row * WIDTH + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :],
        mask=mask[:, None],
        other=0.0,
    )
    tl.store(out + row * (WIDTH // GROUP) + group, tl.sum(numbers.to(tl.float32), axis=1), mask=mask)


def group_sums(x: Tensor, group: int) -> Tensor:
    """Return the sums of every `group` numbers of x [rows, K], float32 [rows, K / group]."""
    rows, width = x.shape
    out = torch.empty((rows, width // group), dtype=torch.float32, device=x.device)
    _group_sums[(rows, triton.cdiv(out.shape[1], _GROUPS))](
        x, out, WIDTH=width, GROUPS=_GROUPS, GROUP=group, **pdl_options(x)
    )
    return out


@kernel()
def _take_columns(x, order, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    source = tl.load(order + columns, mask=mask, other=0)
    tl.store(out + row * WIDTH + columns, tl.load(x + row * WIDTH + source, mask=mask), mask=mask)


def take_columns(x: Tensor, order: Tensor, out: Tensor) -> Tensor:
    """Write x[:, order[k]] to out[:, k] for all k; return `out`."""
    rows, width = x.shape
    block = min(1024, triton.next_power_of_2(width))
    _take_columns[(rows, triton.cdiv(width, block))](
        x, order, out, WIDTH=width, BLOCK=block, **pdl_options(x)
    )
    return out
