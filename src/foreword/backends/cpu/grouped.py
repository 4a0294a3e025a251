"""Converts 4-bit matrices of safetensors (GPTQ, AWQ, compressed-tensors) to GGUF-like blocks without loss."""

from collections.abc import Callable

import torch

from foreword.models.formats.checkpoint import Checkpoint, GroupedTensor, PackedTensor, QuantizedTensor
from foreword.models.formats.hf.checkpoint import HfCheckpoint

_COLUMNS = 32  # of a block
_MIDDLE = 8  # zero point of Q4_0


def packed_blocks(checkpoint: Checkpoint, name: str) -> QuantizedTensor | None:
    """Return a packed matrix of a checkpoint as blocks; None: it must be unpacked."""
    return readable_blocks(checkpoint.kept, name) if isinstance(checkpoint, HfCheckpoint) else None


def readable_blocks(kept: Callable[[str], PackedTensor | None], name: str) -> QuantizedTensor | None:
    """Return a packed matrix as blocks; None: it must be unpacked.

    It returns None also for a damaged matrix: unpacking then raises the error that the user reads.
    """
    try:
        return as_blocks(kept(name))
    except (RuntimeError, ValueError, IndexError):
        return None


def as_blocks(kept: PackedTensor | None) -> QuantizedTensor | None:
    """Return the matrix as Q4_0 blocks, or as Q4_Z blocks if a group has another zero point than 8.

    A Q4_Z block is a float16 scale, the zero point in one byte, and 16 bytes of codes. The result is None if columns
    are reordered, a group is not a multiple of a block, or a scale is not exact in float16.
    """
    if not isinstance(kept, GroupedTensor) or kept.floats or kept.order is not None:
        return None
    (rows, columns), groups = kept.shape, kept.scales.shape[1]
    if columns % (groups * _COLUMNS):
        return None
    scales = kept.scales.to(torch.float16)
    if not torch.equal(scales.float(), kept.scales.float()) or not bool(scales.isfinite().all()):
        return None
    blocks = columns // groups // _COLUMNS  # of a group
    parts = [scales.repeat_interleave(blocks, dim=1).unsqueeze(-1).view(torch.uint8)]
    is_symmetric = kept.zeros is None or bool((kept.zeros == _MIDDLE).all())
    if not is_symmetric and kept.zeros is not None:
        parts.append(kept.zeros.repeat_interleave(blocks, dim=1).unsqueeze(-1))
    low, high = kept.codes.view(rows, -1, 2, _COLUMNS // 2).unbind(2)
    data = torch.cat((*parts, low | high << 4), dim=-1).flatten(1)
    return QuantizedTensor("Q4_0" if is_symmetric else "Q4_Z", data.numpy(), (rows, columns))
