"""Converts experts that a checkpoint stores in MXFP4 to the layout that the CUDA kernels read."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from foreword.backends.cuda.kernels.mxfp4 import BLOCK, CHUNK, LARGEST_EXPONENT, PackedExperts
from foreword.models.formats.checkpoint import GroupedTensor, PackedTensor, QuantizedTensor

GROUP = 32
"""Entries of K with one exponent."""

SCALE_BIAS = 126
"""Exponent of a group's bf16 factor minus the group's own exponent."""

BIAS = 128
"""Stored exponent of a group with scale 1; codes count halves."""


def packed_experts(
    stored: Iterable[Sequence[PackedTensor | QuantizedTensor | None]],
    dtype: torch.dtype,
    device: torch.device,
) -> PackedExperts | None:
    """Pack the stored matrices of all experts; None: the kernels cannot read them.

    The matrices of an expert that read the same input (gate and up) are interleaved row by row.
    """
    codes_of_experts, exponents_of_experts = [], []
    for matrices in stored:
        codes, exponents = [], []
        for matrix in matrices:
            mxfp4 = None if matrix is None else _mxfp4(matrix)
            if mxfp4 is None:
                return None
            codes.append(mxfp4[0])
            exponents.append(mxfp4[1])
        codes_of_experts.append(torch.stack(codes, dim=2).flatten(1, 2))
        exponents_of_experts.append(torch.stack(exponents, dim=2).flatten(1, 2))
    all_exponents = torch.stack(exponents_of_experts)
    if int(all_exponents.max()) > LARGEST_EXPONENT:
        return None
    return pack(torch.stack(codes_of_experts).to(device), all_exponents.to(device), dtype)


def pack(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> PackedExperts:
    """Return the kernels' layout of codes uint8 [experts, groups, N, 16] and exponents uint8 [experts, groups, N].

    A byte has the codes of entries j and j + 16 of a group.
    """
    packed = [_pack(*matrix) for matrix in zip(codes, exponents, strict=True)]
    packed_codes = torch.stack([expert_codes for expert_codes, _ in packed])
    packed_exponents = torch.stack([expert_exponents for _, expert_exponents in packed])
    return PackedExperts(packed_codes, packed_exponents, dtype)


def _pack(codes: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes int16 and exponents int32 of one expert, see `PackedExperts`.

    Of each 16 entries of K, lane 4 r + q of a warp has four: 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, of rows r and r + 8.
    """
    groups, rows = exponents.shape
    padding = 0, -rows % BLOCK.value, 0, -groups % (CHUNK.value // GROUP)  # of rows, of groups
    exponents = pad(exponents + SCALE_BIAS, padding)
    entries = pad(torch.stack((codes & 15, codes >> 4), dim=2), (0, 0, 0, 0, *padding)).short()
    # Axes: chunk, group of the chunk, block, half of the block, row, half of the group, half of 16 entries, lane of the
    # row, entry of a pair
    by_lane = entries.view(len(exponents) // 2, 2, -1, 2, 8, 2, 2, 4, 2).permute(0, 2, 4, 7, 1, 5, 8, 6, 3)
    a, b, c, d = by_lane.flatten(-2).unbind(-1)
    stored = _spread(a, 15, 6) | _spread(b, 12, 3) | _spread(c, 9, 0)
    stored |= (d >> 3) << 14 | (d >> 2 & 1) << 13 | (d & 3) << 10
    scales = exponents.view(len(exponents) // 2, 2, -1, 2, 8).permute(0, 2, 4, 1, 3).contiguous()
    return stored.flatten(2).contiguous(), scales.flatten(-2).view(torch.int32).squeeze(-1)


def _spread(codes: Tensor, sign: int, size: int) -> Tensor:
    """Return codes with their sign bit at bit `sign` and their other bits from bit `size` on."""
    return (codes >> 3) << sign | (codes & 7) << size


def _mxfp4(stored: PackedTensor | QuantizedTensor) -> tuple[Tensor, Tensor] | None:
    """Return codes uint8 [K / 32, N, 16] and exponents uint8 [K / 32, N]; None: the matrix is not in MXFP4."""
    if isinstance(stored, GroupedTensor):
        if not stored.floats or stored.codes.shape[1] != GROUP * stored.scales.shape[1]:
            return None
        groups = stored.codes.view(len(stored.codes), -1, 2, GROUP // 2)
        codes = groups[:, :, 0] | groups[:, :, 1] << 4
        exponents = (torch.frexp(stored.scales.float()).exponent - 1 + BIAS).to(torch.uint8)
    elif isinstance(stored, QuantizedTensor) and stored.kind == "MXFP4":
        blocks = torch.from_numpy(np.ascontiguousarray(stored.data)).view(
            len(stored.data), -1, 1 + GROUP // 2
        )
        exponents, codes = blocks[..., 0], blocks[..., 1:]
    else:
        return None
    return codes.transpose(0, 1).contiguous(), exponents.T.contiguous()
