"""Experts that a checkpoint stores in MXFP4, as the CUDA kernels read them."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from foreword.backends.cuda.kernels.mxfp4 import DEPTH, LARGEST_EXPONENT, PackedExperts
from foreword.models.formats.checkpoint import QuantizedTensor
from foreword.models.formats.hf.packed_tensors import GroupedTensor, Kept

GROUP = 32
"""Entries of K with one exponent."""

GROUPS_AT_ONCE = DEPTH.value // GROUP

BIAS = 128
"""Exponent of a group whose codes, which stand for halves, have the scale 1."""


def packed_experts(
    kept: Iterable[Sequence[Kept | QuantizedTensor | None]], dtype: torch.dtype, device: torch.device
) -> PackedExperts | None:
    """Join stored matrices, which read the same input, by expert; None: the kernels cannot read them."""
    experts = []
    for parts in kept:
        pieces = [piece for part in parts if part is not None and (piece := _mxfp4(part)) is not None]
        if len(pieces) < len(parts):
            return None
        experts.append([torch.cat(both, dim=1) for both in zip(*pieces, strict=True)])
    codes, exponents = (torch.stack([expert[at] for expert in experts]) for at in (0, 1))
    if int(exponents.max()) > LARGEST_EXPONENT:
        return None
    return pack(codes.to(device), exponents.to(device), dtype)


def pack(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> PackedExperts:
    """Return the kernels' form of codes uint8 [experts, groups, N, 16] and exponents uint8 [experts, groups, N]."""
    count, groups, rows = exponents.shape
    missing = -groups % GROUPS_AT_ONCE
    if missing:
        codes, exponents = (
            torch.cat((numbers, numbers.new_zeros((count, missing, *numbers.shape[2:]))), dim=1)
            for numbers in (codes, exponents)
        )
    fours = exponents.view(count, -1, GROUPS_AT_ONCE, rows).transpose(2, 3).contiguous()
    return PackedExperts(codes.contiguous(), fours.view(torch.int32).squeeze(-1), dtype)


def _mxfp4(kept: Kept | QuantizedTensor) -> tuple[Tensor, Tensor] | None:
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
