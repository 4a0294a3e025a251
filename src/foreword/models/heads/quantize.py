"""Heads in 8 bits: small enough to ship."""

from pathlib import Path

import torch
from torch import Tensor

from foreword.models.heads.layouts.names import OURS, SCALE
from foreword.models.heads.opening import Head
from foreword.models.heads.writing import stored_tensors, write_head

GROUP = 64
"""Columns that share a scale."""


def quantize_head(head: Head, out: Path) -> int:
    """Write the head with its matrices in 8 bits into a new directory; returns its size in bytes.

    A matrix `x.weight` is int8, and beside it stands `x.weight_scale`, float16 [rows, groups]; norms, biases and
    tables stay as they are.
    """
    tensors: dict[str, Tensor] = {}
    for name, stored in stored_tensors(head).items():
        if stored.ndim == 2 and stored.dtype.is_floating_point and not name.endswith(SCALE):
            tensors[name], tensors[name + SCALE] = rounded(head.load(name))
        else:
            tensors[name] = stored
    settings = {"quant_method": OURS, "bits": 8, "group_size": GROUP}
    return write_head(head, out, tensors, {"quantization_config": settings})


def rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8 levels of the same shape, and the scale of every `GROUP` columns of a row."""
    rows, columns = matrix.shape
    groups = -(-columns // GROUP)
    padded = torch.nn.functional.pad(matrix, (0, groups * GROUP - columns)).view(rows, groups, GROUP)
    scales = (padded.abs().amax(-1) / 127).half()
    # What rounds to a scale of 0 is 0 itself.
    levels = padded / scales.float().clamp(min=torch.finfo(torch.float16).tiny)[..., None]
    return levels.round().clamp(-127, 127).to(torch.int8).flatten(1)[:, :columns], scales
