"""Packs weights for the CPU kernels in one of several number formats."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
"""Blocks that the kernels read directly, with the offsets of their half-precision numbers: GGUF's, and Q4_Z of
`grouped.py`."""

_NARROW_KINDS = BLOCK_KINDS.keys() - {"Q8_0"}  # fewer bytes than with `int8`

BLOCK_COLUMNS = 32
ROTATED_GROUPS = (192, 128, 64)
"""Candidate group sizes (columns per scale) of a rotated matrix, cheapest first."""


@dataclass(frozen=True)
class WeightForm:
    """Number format of a model's matrices and KV rows."""

    name: str  # as in `--dtype`
    floats: bool = False  # matrices stay float32
    keeps_blocks: bool = False  # use GGUF blocks unchanged
    rotated: bool = False  # apply a Hadamard rotation to blocks of 64 columns before rounding to 8 bits
    kv_dtype: str = "bfloat16"  # as in `--kv-cache-dtype`


FORMS = {
    "auto": WeightForm("auto"),  # `chosen_form` replaces it
    "float32": WeightForm("float32", floats=True, kv_dtype="float32"),
    "int8": WeightForm("int8", rotated=True),
    "stored": WeightForm("stored", keeps_blocks=True, rotated=True),
    "q8_0": WeightForm("q8_0", keeps_blocks=False),
}
FORMS["q4"] = FORMS["stored"]  # its earlier name
"""`q8_0` rounds like GGUF's format of that name and serves as a reference."""

BLOCK_SETS = ("avx512-vnni", "avx2")
"""Instruction sets with faster passes over blocks than over `int8`: docs/kernels.md, "Which format"."""

_REORDERED = ("q_proj.weight", "k_proj.weight")  # their blocks would be copied into another order


def default_form(checkpoint: Checkpoint, isa: str) -> tuple[WeightForm, str]:
    """Return the format that `--dtype auto` stands for, and why.

    The rule is fixed: a choice by measurement could differ between two starts, and with it the text of a seed.
    """
    if isa not in BLOCK_SETS:
        return FORMS["int8"], f"passes over blocks were not measured to be faster on {isa}"
    names, counts = checkpoint.tensor_names(), Counter[bool]()
    known: bool | None = None  # of packed safetensors, whose matrices are alike
    for name, shape in expected_shapes(checkpoint.config).items():
        if len(shape) != 2 or name.endswith(_REORDERED) or name not in names:
            continue
        stored = checkpoint.quantized(name)
        is_narrow = stored is not None and stored.kind in _NARROW_KINDS
        if isinstance(checkpoint, HfCheckpoint) and checkpoint.is_packed(name):
            known = packed_blocks(checkpoint, name) is not None if known is None else known
            is_narrow = known
        counts[is_narrow] += shape[0] * shape[1]
    if counts[True] <= counts[False]:
        return FORMS["int8"], "most weights of the file have 8 bits or more"
    return FORMS["stored"], f"the file's blocks have fewer than 8 bits, and {isa} reads them faster"


def rotated_group(columns: int) -> int:
    """Return the largest group size with the least padding at the end of a row."""
    return min(ROTATED_GROUPS, key=lambda group: (-(-columns // group) * group, -group))


def has_finite_scales(stored: QuantizedTensor) -> bool:
    """Whether all block scales and minima are finite; the levels are integers."""
    columns = gguf.QK_K if stored.kind.endswith("_K") else BLOCK_COLUMNS
    blocks = stored.data.reshape(len(stored.data), stored.shape[1] // columns, -1)
    halves = (
        np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16) for at in BLOCK_KINDS[stored.kind]
    )
    return all(bool(np.isfinite(numbers).all()) for numbers in halves)


def _stored(checkpoint: Checkpoint, name: str) -> QuantizedTensor | None:
    """Return a matrix as blocks, of a GGUF file or of packed safetensors."""
    return checkpoint.quantized(name) or packed_blocks(checkpoint, name)


def chosen_form(form: WeightForm, checkpoint: Checkpoint, isa: str) -> WeightForm:
    """Return the format to pack a checkpoint in: the given one unless it is `auto`."""
    if form.name != "auto":
        return form
    return replace(default_form(checkpoint, isa)[0], kv_dtype=form.kv_dtype)


class MatrixPacker:
    """Packs matrices of one checkpoint into one format."""

    def __init__(
        self, checkpoint: Checkpoint, form: WeightForm, isa: str, threads: int, progress: Progress | None
    ) -> None:
        from foreword.kernels import _native

        self._checkpoint = checkpoint
        self._form = form
        self._isa = isa
        self._threads = threads
        self._arena = _native.Arena()
        self._loader = WeightLoader(checkpoint, torch.float32, torch.device("cpu"), progress)
        if form.keeps_blocks and not self._has_blocks():
            kinds = ", ".join(BLOCK_KINDS)
            raise CheckpointError(
                f"{checkpoint.path} has no blocks to keep ({kinds}); use --dtype int8 or another file"
            )

    def _has_blocks(self) -> bool:
        stored = (_stored(self._checkpoint, name) for name in sorted(self._checkpoint.tensor_names()))
        return any(blocks is not None and blocks.kind in BLOCK_KINDS for blocks in stored)

    def vector(self, name: str) -> torch.Tensor:
        """Return a norm's weights, float32 [n]."""
        return self._loader.tensor(name)

    def floats(self, name: str, biased: bool = False) -> "PackedMatrix":
        """Pack a matrix in float32, whatever the format."""
        from foreword.kernels._native import PackedMatrix

        packed = PackedMatrix.keep_floats(self._arena, self._loader.tensor(name))
        if biased:
            self._set_biases([name], [packed])
        return packed

    def matrices(self, names: list[str], biased: bool) -> list["PackedMatrix"]:
        """Pack projections of one input with equal grouping, so that the input is quantised once."""
        stored = {name: self._blocks(name) for name in names}
        keep = self._form.keeps_blocks and any(blocks is not None for blocks in stored.values())
        packed = [self._matrix(name, stored[name], keep) for name in names]
        if biased:
            self._set_biases(names, packed)
        return packed

    def _set_biases(self, names: list[str], packed: "list[PackedMatrix]") -> None:
        for name, matrix in zip(names, packed, strict=True):
            matrix.set_bias(self.vector(name.removesuffix("weight") + "bias"))

    def _blocks(self, name: str) -> QuantizedTensor | None:
        stored = _stored(self._checkpoint, name)
        if stored is None or stored.kind not in BLOCK_KINDS:
            return None
        self._loader.check_shape(name, stored.shape)
        self._loader.check_finite(name, has_finite_scales(stored))
        return stored

    def _matrix(self, name: str, stored: QuantizedTensor | None, keep: bool) -> "PackedMatrix":
        from foreword.kernels._native import PackedMatrix

        if self._form.floats:
            return PackedMatrix.keep_floats(self._arena, self._loader.tensor(name))
        if keep and stored is not None:
            kept = PackedMatrix.keep_blocks(self._arena, stored.kind, stored.data, self._threads)
            self._loader.count()
            return kept
        rotated = self._form.rotated and not keep
        rows, columns = self._loader.shape(name)
        group = rotated_group(columns) if rotated else BLOCK_COLUMNS
        if stored is not None:
            packed = PackedMatrix.round_blocks(
                self._arena, stored.kind, stored.data, group, rotated, self._isa, self._threads
            )
            self._loader.count()
            return packed
        packed, done = PackedMatrix.rounded(self._arena, rows, columns, group, rotated), 0
        for piece in self._loader.pieces(name):
            packed.round_rows(done, piece, self._isa, self._threads)
            done += len(piece)
        return packed
