"""Converts 4-bit matrices of safetensors (GPTQ, AWQ, compressed-tensors) to Q4_0 or Q4_Z blocks without loss."""

from collections.abc import Callable

import torch

from foreword.models.formats.checkpoint import Checkpoint, GroupedTensor, PackedTensor, QuantizedTensor
from foreword.models.formats.hf.checkpoint import HfCheckpoint

_COLUMNS = 32  # of a block
_Q4_0_ZERO = 8  # zero point of Q4_0


def packed_blocks(checkpoint: Checkpoint, name: str) -> QuantizedTensor | None:
    """Return a packed matrix of a checkpoint as blocks; None if it has none and must be unpacked."""
    return readable_blocks(checkpoint.packed_tensor, name) if isinstance(checkpoint, HfCheckpoint) else None


def readable_blocks(load_packed: Callable[[str], PackedTensor | None], name: str) -> QuantizedTensor | None:
    """Return a packed matrix as blocks; None if it has none and must be unpacked.

    The result is None for a damaged matrix, too: unpacking then raises the error that users see.
    """
    try:
        return as_blocks(load_packed(name))
    except (RuntimeError, ValueError, IndexError):
        return None


def as_blocks(packed: PackedTensor | None) -> QuantizedTensor | None:
    """Return the matrix as Q4_0 blocks, or as Q4_Z blocks if a zero point is not 8.

    A Q4_Z block is a float16 scale, the zero point in one byte, and 16 bytes of codes. The result is None if columns
    are reordered, a group is not a multiple of a block, or a scale is not exact in float16.
    """
    if not isinstance(packed, GroupedTensor) or packed.floats or packed.order is not None:
        return None
    (rows, columns), groups = packed.shape, packed.scales.shape[1]
    if columns % (groups * _COLUMNS):
        return None
    scales = packed.scales.to(torch.float16)
    if not torch.equal(scales.float(), packed.scales.float()) or not bool(scales.isfinite().all()):
        return None
    blocks = columns // groups // _COLUMNS  # per group
    fields = [scales.repeat_interleave(blocks, dim=1).unsqueeze(-1).view(torch.uint8)]
    is_symmetric = packed.zeros is None or bool((packed.zeros == _Q4_0_ZERO).all())
    if not is_symmetric and packed.zeros is not None:
        fields.append(packed.zeros.repeat_interleave(blocks, dim=1).unsqueeze(-1))
    low, high = packed.codes.view(rows, -1, 2, _COLUMNS // 2).unbind(2)
    data = torch.cat((*fields, low | high << 4), dim=-1).flatten(1)
    return QuantizedTensor("Q4_0" if is_symmetric else "Q4_Z", data.numpy(), (rows, columns))
