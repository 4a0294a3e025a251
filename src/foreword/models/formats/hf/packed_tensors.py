"""Matrices of a checkpoint that are stored packed, and how a format packs them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

Parts = Mapping[str, Tensor]
"""Tensors of one matrix by name suffix: "qweight", "scales", ..."""


FP8_BLOCK = 128
"""Block size (rows and columns per scale) that can be kept."""


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix stored in FP8."""

    values: Tensor  # e4m3 [out, in]
    scales: Tensor  # float32 [out, 1]; in blocks, [out / FP8_BLOCK, in / FP8_BLOCK]
    in_blocks: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        return tuple(self.values.shape)


@dataclass(frozen=True)
class GroupedTensor:
    """A matrix stored as 4-bit codes, with a scale per group of columns."""

    codes: Tensor  # uint8 [out, in]
    scales: Tensor  # [out, groups]
    zeros: Tensor | None  # uint8 [out, groups], the code of 0; None: 8, or float codes
    order: Tensor | None = (
        None  # int32 [in], the column of the matrix that each column of codes is; None: its own
    )
    floats: bool = False  # codes are 4-bit floats (E2M1), with scales halved

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        return tuple(self.codes.shape)

    def rows(self, read: Callable[[Tensor], Tensor]) -> "GroupedTensor":
        """Return some of the rows, or all in another order."""
        zeros = None if self.zeros is None else read(self.zeros)
        return replace(self, codes=read(self.codes), scales=read(self.scales), zeros=zeros)


Kept = Fp8Tensor | GroupedTensor
"""A matrix that stays packed."""


@dataclass(frozen=True)
class Scheme:
    """A packing format of matrices."""

    title: str
    marker: str  # suffix of the packed numbers; "weight" if plain matrices have it too
    needed: tuple[str, ...]  # required suffixes
    extra: tuple[str, ...]  # optional suffixes
    unpack: Callable[[Parts], Tensor]  # float32 [out, in]
    keep: Callable[[Parts], Kept | None] = lambda _: None  # None: it must be unpacked
