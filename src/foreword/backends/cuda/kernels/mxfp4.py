"""Matrix products with weights in MXFP4, which are unpacked on the way to the tensor cores.

A number of MXFP4 is a bf16, too: no number is rounded, and products have the bits of those with unpacked weights.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

DEPTH = tl.constexpr(128)
"""Entries of K that are loaded together, four groups: their exponents are a word, which a GPU can load ahead."""


@dataclass(frozen=True)
class PackedExperts:
    """The matrices [N, K] of all experts; K is filled up to a multiple of `DEPTH` with zeros.

    The groups of a tile of rows are one piece of memory.
    """

    codes: Tensor  # uint8 [experts, K / 32, N, 16]: entries j and j + 16 of a group
    exponents: Tensor  # int32 [experts, K / 128, N], the first of four groups lowest, at most `LARGEST_EXPONENT` each
    dtype: torch.dtype = torch.bfloat16  # of the numbers

    @property
    def nbytes(self) -> int:
        """Memory of codes and exponents."""
        return self.codes.nbytes + self.exponents.nbytes


LARGEST_EXPONENT = 128
"""Exponent of a group with numbers up to 12; larger ones have no scale in bf16."""

# Four bytes to four numbers of their low halves and four of their high ones. Exponent and mantissa of a code are
# those of a bf16 that is 2 ** 126 times smaller; the scale makes up for it.
_UNPACK = tl.constexpr("""
{
.reg .b32 one, two, low, sign;
prmt.b32 one, $4, 0, 0x4140;
prmt.b32 two, $4, 0, 0x4342;
shl.b32 low, one, 6;
and.b32 low, low, 0x01C001C0;
shl.b32 sign, one, 12;
lop3.b32 low, sign, 0x80008000, low, 0xEA;
mul.bf16x2 $0, low, $5;
shl.b32 low, two, 6;
and.b32 low, low, 0x01C001C0;
shl.b32 sign, two, 12;
lop3.b32 low, sign, 0x80008000, low, 0xEA;
mul.bf16x2 $1, low, $5;
shl.b32 low, one, 2;
and.b32 low, low, 0x01C001C0;
shl.b32 sign, one, 8;
lop3.b32 low, sign, 0x80008000, low, 0xEA;
mul.bf16x2 $2, low, $5;
shl.b32 low, two, 2;
and.b32 low, low, 0x01C001C0;
shl.b32 sign, two, 8;
lop3.b32 low, sign, 0x80008000, low, 0xEA;
mul.bf16x2 $3, low, $5;
}
""")


@triton.jit
def _unpacked(codes, exponents, like, COLUMNS: tl.constexpr, IN_PAIRS: tl.constexpr):
    """[COLUMNS, DEPTH] of codes [COLUMNS, DEPTH / 2] and exponents [COLUMNS]."""
    groups: tl.constexpr = DEPTH // 32
    own = (exponents[:, None] >> (8 * tl.arange(0, groups))[None, :]) & 255
    scales = ((own + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True).to(like)
    scales = tl.broadcast_to(scales[:, :, None], (COLUMNS, groups, 16))
    codes = tl.reshape(codes, (COLUMNS, groups, 16))
    if IN_PAIRS:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r,r,r", [codes, scales], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        wide = codes.to(tl.int16)
        low = ((wide & 7) << 6) | ((wide & 8) << 12)
        high = ((wide & 0x70) << 2) | ((wide & 0x80) << 8)
        low = low.to(tl.bfloat16, bitcast=True).to(like) * scales
        high = high.to(tl.bfloat16, bitcast=True).to(like) * scales
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (COLUMNS, DEPTH))


@triton.jit
def packed_product(
    x_at, codes_at, exponents_at, row_there, column_there, K, lines,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[ROWS, COLUMNS], as `linear.product`, with the weights at codes_at and exponents_at [COLUMNS] on the wide side.

    `lines` is how many rows the weights have: the distance from a group to the next one.
    """
    k, byte = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 2)
    x_at = x_at[:, None] + k[None, :]
    codes_at = codes_at[:, None] + (byte // 16 * lines * 16 + byte % 16)[None, :]
    like = x_at.dtype.element_ty
    in_pairs: tl.constexpr = like == tl.bfloat16
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for first in range(0, K, DEPTH):
        there = row_there[:, None]
        if not EVEN:
            there = there & ((first + k) < K)[None, :]
        codes = tl.load(codes_at, mask=column_there[:, None], other=0)
        exponents = tl.load(exponents_at, mask=column_there, other=0)
        a = tl.load(x_at, mask=there, other=0.0)
        b = _unpacked(codes, exponents, like, COLUMNS, in_pairs)
        total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
        x_at += DEPTH
        codes_at += DEPTH // 2 * lines
        exponents_at += lines
    return tl.trans(total)
