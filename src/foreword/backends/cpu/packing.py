"""Packs weights for the CPU kernels in one of several number formats."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import gguf
import numpy as np
import torch

from foreword.backends.cpu.grouped import packed_blocks
from foreword.backends.weight_loader import WeightLoader
from foreword.errors import CheckpointError
from foreword.models.formats.checkpoint import Checkpoint, QuantizedTensor
from foreword.models.formats.hf.checkpoint import HfCheckpoint
from foreword.models.layer_shapes import expected_shapes
from foreword.progress import Progress

if TYPE_CHECKING:
    from foreword.kernels._native import PackedMatrix

BLOCK_KINDS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_Z": (0,),
}
"""Kinds of blocks that the kernels read, and the byte offsets of the float16 scales and minima in a block.

All are GGUF's but Q4_Z, which `grouped.py` makes.
"""

_NARROW_KINDS = BLOCK_KINDS.keys() - {"Q8_0"}  # with fewer bytes per weight than `int8`

BLOCK_COLUMNS = 32
"""Columns of a block, except those of K kinds, which have 256."""

ROTATED_GROUPS = (192, 128, 64)
"""Possible group sizes (columns per scale) of a rotated matrix. Larger groups are faster."""


@dataclass(frozen=True)
class WeightFormat:
    """Number format of a model's matrices and KV rows."""

    name: str  # as in `--dtype`
    is_float32: bool = False  # matrices stay float32
    keeps_blocks: bool = False  # GGUF blocks are used unchanged; other matrices are rounded to 8 bits
    is_rotated: bool = False  # blocks of 64 columns get a Hadamard rotation before they are rounded to 8 bits
    kv_dtype: str = "bfloat16"  # as in `--kv-cache-dtype`


FORMATS = {
    "auto": WeightFormat("auto"),  # `resolve_format` replaces it
    "float32": WeightFormat("float32", is_float32=True, kv_dtype="float32"),
    "int8": WeightFormat("int8", is_rotated=True),
    "stored": WeightFormat("stored", keeps_blocks=True, is_rotated=True),
    "q8_0": WeightFormat("q8_0"),  # rounds like GGUF's format of that name; a reference for tests
}
FORMATS["q4"] = FORMATS["stored"]  # the earlier name of `stored`

FAST_BLOCK_ISAS = ("avx512-amx", "avx512-vnni", "avx2")
"""Instruction sets on which `stored` is faster than `int8`: docs/kernels.md, "Which format"."""

_REORDERED = ("q_proj.weight", "k_proj.weight")
"""Matrices that `default_format` does not count. GGUF files reorder their rows, so reading must copy them."""


def default_format(checkpoint: Checkpoint, isa: str) -> tuple[WeightFormat, str]:
    """Return the format that `--dtype auto` stands for, and why.

    The rule is fixed. A choice by measurement could differ between two starts, and then a seed's text would, too.
    """
    if isa not in FAST_BLOCK_ISAS:
        return FORMATS["int8"], f"passes over blocks were not measured to be faster on {isa}"
    names = checkpoint.tensor_names()
    counts: Counter[bool] = Counter()  # weights, by whether their blocks are narrow
    packed_are_narrow: bool | None = None  # of packed safetensors, whose matrices all have the same format
    for name, shape in expected_shapes(checkpoint.config).items():
        if len(shape) != 2 or name.endswith(_REORDERED) or name not in names:
            continue
        stored = checkpoint.quantized(name)
        is_narrow = stored is not None and stored.kind in _NARROW_KINDS
        if isinstance(checkpoint, HfCheckpoint) and checkpoint.is_packed(name):
            if packed_are_narrow is None:
                packed_are_narrow = packed_blocks(checkpoint, name) is not None
            is_narrow = packed_are_narrow
        counts[is_narrow] += shape[0] * shape[1]
    if counts[True] <= counts[False]:
        return FORMATS["int8"], "most weights of the file have 8 bits or more"
    return FORMATS["stored"], f"the file's blocks have fewer than 8 bits, and {isa} reads them faster"


def rotated_group_size(columns: int) -> int:
    """Return the largest group size with the least padding at the end of a row."""
    return min(ROTATED_GROUPS, key=lambda group: (-(-columns // group) * group, -group))


def has_finite_scales(stored: QuantizedTensor) -> bool:
    """Return whether all scales and minima of the blocks are finite. The other numbers are integers."""
    columns = gguf.QK_K if stored.kind.endswith("_K") else BLOCK_COLUMNS
    blocks = stored.data.reshape(len(stored.data), stored.shape[1] // columns, -1)
    halves = (
        np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)
        for offset in BLOCK_KINDS[stored.kind]
    )
    return all(bool(np.isfinite(numbers).all()) for numbers in halves)


def _stored(checkpoint: Checkpoint, name: str) -> QuantizedTensor | None:
    """Return a matrix of a GGUF file or of packed safetensors as blocks; None if it has none."""
    return checkpoint.quantized(name) or packed_blocks(checkpoint, name)


def resolve_format(number_format: WeightFormat, checkpoint: Checkpoint, isa: str) -> WeightFormat:
    """Return the format to pack a checkpoint in: the given one unless it is `auto`."""
    if number_format.name != "auto":
        return number_format
    return replace(default_format(checkpoint, isa)[0], kv_dtype=number_format.kv_dtype)


class TensorPacker(Protocol):
    """Packs tensors of a decoder (`MatrixPacker`) or of a draft head (`HeadPacker`)."""

    def matrices(self, names: list[str], biased: bool) -> "list[PackedMatrix]":
        """Pack matrices that read the same input; `biased`: with the biases that the file has."""

    def pack(self, values: torch.Tensor) -> "PackedMatrix":
        """Pack a float32 matrix."""

    def floats(self, name: str, biased: bool = False) -> "PackedMatrix":
        """Pack a matrix in float32, whatever the format."""

    def vector(self, name: str) -> torch.Tensor | None:
        """Return a tensor that is not packed, float32; None if a head does not have it."""


class MatrixPacker:
    """Packs matrices of one checkpoint into one format."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        number_format: WeightFormat,
        isa: str,
        threads: int,
        progress: Progress | None,
    ) -> None:
        from foreword.kernels import _native

        self._checkpoint = checkpoint
        self._number_format = number_format
        self._isa = isa
        self._threads = threads
        self._arena = _native.Arena()
        self._loader = WeightLoader(checkpoint, torch.float32, torch.device("cpu"), progress)
        if number_format.keeps_blocks and not self._has_blocks():
            kinds = ", ".join(BLOCK_KINDS)
            raise CheckpointError(
                f"{checkpoint.path} has no blocks to keep ({kinds}); use --dtype int8 or another file"
            )

    def _has_blocks(self) -> bool:
        stored = (_stored(self._checkpoint, name) for name in sorted(self._checkpoint.tensor_names()))
        return any(blocks is not None and blocks.kind in BLOCK_KINDS for blocks in stored)

    def vector(self, name: str) -> torch.Tensor:
        """Return a tensor that is not packed, such as a norm's weights, float32."""
        return self._loader.tensor(name)

    def floats(self, name: str, biased: bool = False) -> "PackedMatrix":
        """Pack a matrix in float32, whatever the format."""
        from foreword.kernels._native import PackedMatrix

        packed = PackedMatrix.keep_floats(self._arena, self._loader.tensor(name))
        if biased:
            self._set_biases([name], [packed])
        return packed

    def matrices(self, names: list[str], biased: bool) -> list["PackedMatrix"]:
        """Pack matrices that read the same input, in formats for which that input is quantised only once."""
        stored = {name: self._blocks(name) for name in names}
        keeps_blocks = self._number_format.keeps_blocks and any(
            blocks is not None for blocks in stored.values()
        )
        packed = [self._matrix(name, stored[name], keeps_blocks) for name in names]
        if biased:
            self._set_biases(names, packed)
        return packed

    def _set_biases(self, names: list[str], packed: "list[PackedMatrix]") -> None:
        for name, matrix in zip(names, packed, strict=True):
            bias = name.removesuffix("weight") + "bias"
            if self._loader.has(bias):  # an uncompressed query of latent attention has none
                matrix.set_bias(self.vector(bias))

    def pack(self, values: torch.Tensor) -> "PackedMatrix":
        """Pack a float32 matrix that was made from a tensor of the checkpoint."""
        from foreword.kernels._native import PackedMatrix

        if self._number_format.is_float32:
            return PackedMatrix.keep_floats(self._arena, values)
        is_rotated = self._number_format.is_rotated
        group_size = rotated_group_size(values.shape[1]) if is_rotated else BLOCK_COLUMNS
        return PackedMatrix.round_floats(
            self._arena, values, group_size, is_rotated, self._isa, self._threads
        )

    def _blocks(self, name: str) -> QuantizedTensor | None:
        stored = _stored(self._checkpoint, name)
        if stored is None or stored.kind not in BLOCK_KINDS:
            return None
        self._loader.check_shape(name, stored.shape)
        self._loader.check_finite(name, has_finite_scales(stored))
        return stored

    def _matrix(self, name: str, stored: QuantizedTensor | None, keeps_blocks: bool) -> "PackedMatrix":
        from foreword.kernels._native import PackedMatrix

        if self._number_format.is_float32:
            return PackedMatrix.keep_floats(self._arena, self._loader.tensor(name))
        if keeps_blocks and stored is not None:
            packed = PackedMatrix.keep_blocks(self._arena, stored.kind, stored.data, self._threads)
            self._loader.count()
            return packed
        is_rotated = self._number_format.is_rotated and not keeps_blocks
        rows, columns = self._loader.shape(name)
        group_size = rotated_group_size(columns) if is_rotated else BLOCK_COLUMNS
        if stored is not None:
            packed = PackedMatrix.round_blocks(
                self._arena, stored.kind, stored.data, group_size, is_rotated, self._isa, self._threads
            )
            self._loader.count()
            return packed
        packed = PackedMatrix.zeros_int8(self._arena, rows, columns, group_size, is_rotated)
        first_row = 0
        for piece in self._loader.pieces(name):
            packed.round_rows(first_row, piece, self._isa, self._threads)
            first_row += len(piece)
        return packed
