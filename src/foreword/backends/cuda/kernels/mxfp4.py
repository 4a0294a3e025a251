"""Matrix products with weights in MXFP4, which are unpacked on the way to the tensor cores.

Every MXFP4 number of a group with an exponent up to `LARGEST_EXPONENT` is also a bf16 number. So nothing is rounded,
and products have the bits of those with unpacked weights.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = tl.constexpr(64)
"""Weights are processed in chunks: this many entries of a row, along the inner dimension K. The codes of one row's
chunk are in four lanes of a warp."""

BLOCK = tl.constexpr(16)
"""Rows of a block: one warp has the codes of these rows of the weights for a chunk."""


@dataclass(frozen=True)
class PackedExperts:
    """The matrices [N, K] of all experts, padded with zeros to multiples of `BLOCK` and `CHUNK`.

    Codes are stored in the order in which tensor cores read numbers: a lane of a warp loads 16 bytes, all for itself.
    """

    codes: Tensor  # int16 [experts, K / CHUNK, N / BLOCK, 256], see `expert_packing.pack`
    # int32 [experts, K / CHUNK, N / BLOCK, 8]: bf16 exponents of the scales. Each is the group's own exponent + 126,
    # because an unpacked code is 2 ** 126 times too small. The bytes of word r, from the lowest on, are those of rows r
    # and r + 8 for the first group of 32 entries, then for the second.
    exponents: Tensor
    dtype: torch.dtype = torch.bfloat16  # of the numbers

    @property
    def nbytes(self) -> int:
        """Memory of codes and exponents."""
        return self.codes.nbytes + self.exponents.nbytes


LARGEST_EXPONENT = 128
"""Largest exponent of a group in a file. A larger one, plus 126, does not fit into a bf16's exponent."""

# Unpacks the two halves of a word into four pairs of numbers. A code has the exponent and mantissa of a bf16 that is
# 2 ** 126 times smaller; the scale compensates for that. The bits of three of the four codes are spaced as in a bf16.
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
def _bf16(bits, dtype):
    """Return the bf16 number with these low 16 bits, as `dtype`."""
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True).to(dtype)


@triton.jit
def _unpacked(codes, exponents, dtype, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Unpack codes [DEPTH / CHUNK, COLUMNS * 16] with exponents [DEPTH / CHUNK, COLUMNS / 2]: [COLUMNS, DEPTH]."""
    chunks: tl.constexpr = DEPTH // CHUNK
    blocks: tl.constexpr = COLUMNS // BLOCK
    words = tl.reshape(exponents, (chunks, blocks, 8, 1))
    # A tensor-core instruction has 16 entries of K, so two instructions share a group's exponent.
    words = words >> (16 * (tl.arange(0, 4) // 2))[None, None, None, :]
    # [chunk, block, row % 8, lane of four, instruction, pair]
    shape: tl.constexpr = (chunks, blocks, 8, 4, 4, 2)
    scale = tl.broadcast_to(_bf16((words & 255) << 7, dtype)[:, :, :, None, :, None], shape)
    scale_8_below = tl.broadcast_to(_bf16((words >> 8 & 255) << 7, dtype)[:, :, :, None, :, None], shape)
    codes = tl.reshape(codes, shape)
    if IN_PAIRS:
        a, b, c, d = tl.inline_asm_elementwise(
            _UNPACK,
            "=r,=r,=r,=r,r,r,r",
            [codes, scale, scale_8_below],
            (tl.bfloat16,) * 4,
            is_pure=True,
            pack=2,
        )
    else:
        wide = codes.to(tl.int32)
        a, b = _bf16(wide & 0x81C0, dtype) * scale, _bf16(wide << 3 & 0x81C0, dtype) * scale_8_below
        c = _bf16(wide << 6 & 0x81C0, dtype) * scale
        d = _bf16(wide << 1 & 0x8000 | wide >> 5 & 0x0100 | wide >> 4 & 0x00C0, dtype) * scale_8_below
    # Two more dimensions: half of an instruction's 16 entries; row r or r + 8.
    unpacked = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(unpacked, (1, 6, 2, 0, 4, 7, 3, 5)), (COLUMNS, DEPTH))


@triton.jit
def packed_product(
    x_at, codes_at, exponents_at, row_mask, columns_left, K, num_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return [ROWS, COLUMNS], as `linear.product`; the weights, from codes_at and exponents_at on, are the M side.

    `num_columns` is the number of output columns (rows of the whole matrix), `columns_left` how many of them there are
    from this program's first one on.
    """
    chunk = tl.arange(0, DEPTH // CHUNK)
    k, code, exponent = tl.arange(0, DEPTH), tl.arange(0, COLUMNS * 16), tl.arange(0, COLUMNS // 2)
    blocks, blocks_left = tl.cdiv(num_columns, BLOCK), tl.cdiv(columns_left, BLOCK)
    x_at = x_at[:, None] + k[None, :]
    codes_at = codes_at + (chunk * blocks * 256)[:, None] + code[None, :]
    exponents_at = exponents_at + (chunk * blocks * 8)[:, None] + exponent[None, :]
    code_mask, exponent_mask = (code // 256 < blocks_left)[None, :], (exponent // 8 < blocks_left)[None, :]
    dtype = x_at.dtype.element_ty
    in_pairs: tl.constexpr = dtype == tl.bfloat16
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for first in range(0, K, DEPTH):
        mask, code_inside, exponent_inside = row_mask[:, None], code_mask, exponent_mask
        if not EVEN:
            mask = mask & ((first + k) < K)[None, :]
            inside = (first + chunk * CHUNK < K)[:, None]
            code_inside, exponent_inside = code_inside & inside, exponent_inside & inside
        codes = tl.load(codes_at, mask=code_inside, other=0)
        exponents = tl.load(exponents_at, mask=exponent_inside, other=0)
        a = tl.load(x_at, mask=mask, other=0.0)
        b = _unpacked(codes, exponents, dtype, COLUMNS, DEPTH, in_pairs)
        total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
        x_at += DEPTH
        codes_at += DEPTH // CHUNK * blocks * 256
        exponents_at += DEPTH // CHUNK * blocks * 8
    return tl.trans(total)
