"""The form in which a scheme is declared, and what they have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]
"""Tensors of one matrix by what follows its name: "qweight", "scales", ..."""


@dataclass(frozen=True)
class Scheme:
    """How matrices are packed."""

    title: str
    marker: str  # the part that holds the numbers; "weight" where plain matrices are called so, too
    needed: tuple[str, ...]  # parts without which it is no packed matrix
    extra: tuple[str, ...]  # parts that may be there
    unpack: Callable[[Parts], Tensor]  # float32 [out, in]


def unpacked_bits(packed: Tensor, bits: int, dim: int) -> Tensor:
    """int32 with several numbers each, the lowest bits first -> int32 numbers, unsigned, along `dim`."""
    each = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)  # [..., each]
    moved: Tensor = numbers.movedim(-1, dim + 1)
    shape = list(packed.shape)
    shape[dim] *= each
    return moved.reshape(shape)


def spread(scales: Tensor, columns: int) -> Tensor:
    """Scales [rows, groups] -> [rows, columns]."""
    groups = scales.shape[1]
    if columns % groups:
        raise ValueError(f"{columns} columns are not {groups} groups")
    return scales.float().repeat_interleave(columns // groups, dim=1)
