"""Experts that a checkpoint stores in MXFP4, as the CUDA kernels read them."""

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
"""Exponent of the bf16 that a group's numbers are multiplied by, minus the group's own."""

BIAS = 128
"""Exponent of a group whose codes, which stand for halves, have the scale 1."""


def packed_experts(
    kept: Iterable[Sequence[PackedTensor | QuantizedTensor | None]], dtype: torch.dtype, device: torch.device
) -> PackedExperts | None:
    """Join stored matrices, which read the same input, by expert, row by row; None: the kernels cannot read them."""
    experts = []
    for parts in kept:
        pieces = [piece for part in parts if part is not None and (piece := _mxfp4(part)) is not None]
        if len(pieces) < len(parts):
            return None
        experts.append([torch.stack(both, dim=2).flatten(1, 2) for both in zip(*pieces, strict=True)])
    codes, exponents = (torch.stack([expert[at] for expert in experts]) for at in (0, 1))
    if int(exponents.max()) > LARGEST_EXPONENT:
        return None
    return pack(codes.to(device), exponents.to(device), dtype)


def pack(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> PackedExperts:
    """Return the kernels' form of codes uint8 [experts, groups, N, 16] and exponents uint8 [experts, groups, N].

    A byte has the codes of entries j and j + 16 of a group.
    """
    packed = [_pack(*matrix) for matrix in zip(codes, exponents, strict=True)]
    stored, scales = (torch.stack([matrix[at] for matrix in packed]) for at in (0, 1))
    return PackedExperts(stored, scales, dtype)


def _pack(codes: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes int16 and exponents int32 of one expert, see `PackedExperts`.

    Of each 16 entries of K, lane 4 r + q of a warp has four: 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, of rows r and r + 8.
    """
    groups, rows = exponents.shape
    missing = 0, -rows % BLOCK.value, 0, -groups % (CHUNK.value // GROUP)  # of rows, of groups
    exponents = pad(exponents + SCALE_BIAS, missing)
    entries = pad(torch.stack((codes & 15, codes >> 4), dim=2), (0, 0, 0, 0, *missing)).short()
    # By group of a chunk, half of a block, row, half of a group, half of 16 entries, lane of a row, entry of a pair
    by_lane = entries.view(len(exponents) // 2, 2, -1, 2, 8, 2, 2, 4, 2).permute(0, 2, 4, 7, 1, 5, 8, 6, 3)
    a, b, c, d = by_lane.flatten(-2).unbind(-1)
    stored = _apart(a, 15, 6) | _apart(b, 12, 3) | _apart(c, 9, 0)
    stored |= (d >> 3) << 14 | (d >> 2 & 1) << 13 | (d & 3) << 10
    scales = exponents.view(len(exponents) // 2, 2, -1, 2, 8).permute(0, 2, 4, 1, 3).contiguous()
    return stored.flatten(2).contiguous(), scales.flatten(-2).view(torch.int32).squeeze(-1)


def _apart(codes: Tensor, sign: int, size: int) -> Tensor:
    """Return codes with the sign and the other bits at these places."""
    return (codes >> 3) << sign | (codes & 7) << size


def _mxfp4(kept: PackedTensor | QuantizedTensor) -> tuple[Tensor, Tensor] | None:
    """Return codes uint8 [K / 32, N, 16] and exponents uint8 [K / 32, N]; None: it is stored otherwise."""
    if isinstance(kept, GroupedTensor):
        if not kept.floats or kept.codes.shape[1] != GROUP * kept.scales.shape[1]:
            return None
        groups = kept.codes.view(len(kept.codes), -1, 2, GROUP // 2)
        codes = groups[:, :, 0] | groups[:, :, 1] << 4
        exponents = (torch.frexp(kept.scales.float()).exponent - 1 + BIAS).to(torch.uint8)
    elif isinstance(kept, QuantizedTensor) and kept.kind == "MXFP4":
        blocks = torch.from_numpy(np.ascontiguousarray(kept.data)).view(len(kept.data), -1, 1 + GROUP // 2)
        exponents, codes = blocks[..., 0], blocks[..., 1:]
    else:
        return None
    return codes.transpose(0, 1).contiguous(), exponents.T.contiguous()
