"""Matrix products with weights in MXFP4, which are unpacked on the way to the tensor cores.

A number of MXFP4 is a bf16, too: no number is rounded, and products have the bits of those with unpacked weights.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = tl.constexpr(64)
"""Entries of K whose codes for one row are in four lanes of a warp."""

BLOCK = tl.constexpr(16)
"""Rows of the weights whose chunk is in one warp."""


@dataclass(frozen=True)
class PackedExperts:
    """The matrices [N, K] of all experts, filled up with zeros to multiples of `BLOCK` and `CHUNK`.

    Codes are stored as tensor cores take the numbers: a lane of a warp loads 16 bytes, and needs no other lane's.
    """

    codes: Tensor  # int16 [experts, K / CHUNK, N / BLOCK, 256], see `expert_packing.pack`
    exponents: Tensor  # int32 [experts, K / CHUNK, N / BLOCK, 8]: of rows r and r + 8, first group, then second group
    dtype: torch.dtype = torch.bfloat16  # of the numbers

    @property
    def nbytes(self) -> int:
        """Memory of codes and exponents."""
        return self.codes.nbytes + self.exponents.nbytes


LARGEST_EXPONENT = 128
"""Exponent of a group with numbers up to 12; larger ones have no scale in bf16."""

# A word's two halves to four pairs of numbers. Exponent and mantissa of a code are those of a bf16 that is 2 ** 126
# times smaller; the scale makes up for it. Three codes have their bits at the distances that they have in a bf16.
_UNPACK = tl.constexpr("""
{
.reg .b32 one, two, three, four;
and.b32 one, $4, 0x81C081C0;
shl.b32 two, $4, 3;
and.b32 two, two, 0x81C081C0;
shl.b32 three, $4, 6;
and.b32 three, three, 0x81C081C0;
mul.bf16x2 $0, one, $5;
shl.b32 four, $4, 1;
and.b32 four, four, 0x80008000;
shr.u32 one, $4, 5;
lop3.b32 four, one, 0x01000100, four, 0xEA;
shr.u32 one, $4, 4;
lop3.b32 four, one, 0x00C000C0, four, 0xEA;
mul.bf16x2 $1, two, $6;
mul.bf16x2 $2, three, $5;
mul.bf16x2 $3, four, $6;
}
""")


@triton.jit
def _number(bits, like):
    """bf16 of the low 16 bits."""
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True).to(like)


@triton.jit
def _unpacked(codes, exponents, like, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IN_PAIRS: tl.constexpr):
    """[COLUMNS, DEPTH] of codes [DEPTH / CHUNK, COLUMNS * 16] and exponents [DEPTH / CHUNK, COLUMNS / 2]."""
    chunks: tl.constexpr = DEPTH // CHUNK
    blocks: tl.constexpr = COLUMNS // BLOCK
    words = tl.reshape(exponents, (chunks, blocks, 8, 1))
    words = words >> (16 * (tl.arange(0, 4) // 2))[None, None, None, :]  # by step: two steps are a group
    shape: tl.constexpr = (chunks, blocks, 8, 4, 4, 2)
    first = tl.broadcast_to(_number((words & 255) << 7, like)[:, :, :, None, :, None], shape)
    second = tl.broadcast_to(_number((words >> 8 & 255) << 7, like)[:, :, :, None, :, None], shape)
    codes = tl.reshape(codes, shape)
    if IN_PAIRS:
        a, b, c, d = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r,r,r", [codes, first, second], (tl.bfloat16,) * 4, is_pure=True, pack=2
        )
    else:
        wide = codes.to(tl.int32)
        a, b = _number(wide & 0x81C0, like) * first, _number(wide << 3 & 0x81C0, like) * second
        c = _number(wide << 6 & 0x81C0, like) * first
        d = _number(wide << 1 & 0x8000 | wide >> 5 & 0x0100 | wide >> 4 & 0x00C0, like) * second
    by_half = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(by_half, (1, 6, 2, 0, 4, 7, 3, 5)), (COLUMNS, DEPTH))


@triton.jit
def packed_product(
    x_at, codes_at, exponents_at, row_there, columns_left, K, lines,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[ROWS, COLUMNS], as `linear.product`, with weights from codes_at and exponents_at on, on the wide side.

    `lines` is how many rows the weights have, `columns_left` how many from the first column on.
    """
    chunk = tl.arange(0, DEPTH // CHUNK)
    k, half, word = tl.arange(0, DEPTH), tl.arange(0, COLUMNS * 16), tl.arange(0, COLUMNS // 2)
    blocks, blocks_left = tl.cdiv(lines, BLOCK), tl.cdiv(columns_left, BLOCK)
    x_at = x_at[:, None] + k[None, :]
    codes_at = codes_at + (chunk * blocks * 256)[:, None] + half[None, :]
    exponents_at = exponents_at + (chunk * blocks * 8)[:, None] + word[None, :]
    half_there, word_there = (half // 256 < blocks_left)[None, :], (word // 8 < blocks_left)[None, :]
    like = x_at.dtype.element_ty
    in_pairs: tl.constexpr = like == tl.bfloat16
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for first in range(0, K, DEPTH):
        there, of_codes, of_exponents = row_there[:, None], half_there, word_there
        if not EVEN:
            there = there & ((first + k) < K)[None, :]
            inside = (first + chunk * CHUNK < K)[:, None]
            of_codes, of_exponents = of_codes & inside, of_exponents & inside
        codes = tl.load(codes_at, mask=of_codes, other=0)
        exponents = tl.load(exponents_at, mask=of_exponents, other=0)
        a = tl.load(x_at, mask=there, other=0.0)
        b = _unpacked(codes, exponents, like, COLUMNS, DEPTH, in_pairs)
        total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
        x_at += DEPTH
        codes_at += DEPTH // CHUNK * blocks * 256
        exponents_at += DEPTH // CHUNK * blocks * 8
    return tl.trans(total)
