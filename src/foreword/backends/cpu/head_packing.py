"""Packs the matrices of draft heads for the CPU kernels."""

from typing import TYPE_CHECKING

from torch import Tensor

from foreword.backends.cpu.grouped import readable_blocks
from foreword.backends.cpu.packing import BLOCK_KINDS, WeightFormat, rotated_group_size
from foreword.backends.weight_loader import piece_rows
from foreword.models.formats.checkpoint import QuantizedTensor
from foreword.models.heads.opening import Head

if TYPE_CHECKING:
    from foreword.kernels import _native


def _layer_blocks(head: Head) -> dict[str, QuantizedTensor]:
    """Return the matrices of all layers as blocks, by name; empty unless every one of them is stored in blocks.

    Matrices that read the same input need formats that read it in the same form, so blocks are used for all or none.
    """
    matrices: dict[str, QuantizedTensor] = {}
    for name, shape in head.spec.shapes.items():
        if name.startswith("layers.") and len(shape) == 2:
            blocks = readable_blocks(head.packed_tensor, name)
            if blocks is None:
                return {}
            matrices[name] = blocks
    return matrices


class HeadPacker:
    """Packs the matrices of one head in the decoder's number format."""

    def __init__(self, head: Head, number_format: WeightFormat, isa: str, threads: int) -> None:
        from foreword.kernels import _native

        self._head = head
        self._number_format = number_format
        self.isa = isa
        self._threads = threads
        self._arena = _native.Arena()
        self._layer_matrices = _layer_blocks(head) if number_format.keeps_blocks else {}
        self.nbytes = 0  # of all matrices packed until now

    def matrix(self, name: str) -> "_native.PackedMatrix":
        """Pack a matrix with its bias, if any, by module name."""
        packed = self.unbiased(name + ".weight")
        if (bias := self.vector(name + ".bias")) is not None:
            packed.set_bias(bias)
        return packed

    def unbiased(self, weight: str) -> "_native.PackedMatrix":
        """Pack a matrix by tensor name."""
        from foreword.kernels._native import PackedMatrix

        if self._number_format.is_float32:
            packed = PackedMatrix.keep_floats(self._arena, self._head.load(weight))
        elif self._number_format.keeps_blocks and (blocks := self._blocks(weight)) is not None:
            packed = PackedMatrix.keep_blocks(self._arena, blocks.kind, blocks.data, self._threads)
        else:
            packed = self._rounded(weight)
        self.nbytes += packed.nbytes
        return packed

    def _blocks(self, name: str) -> QuantizedTensor | None:
        """Return the blocks of a matrix, from the target's output matrix or the head's file; None if it has none."""
        blocks = self._head.blocks(name) or self._layer_matrices.get(name)
        if blocks is None and self._layer_matrices:
            blocks = readable_blocks(self._head.packed_tensor, name)
        return blocks if blocks is not None and blocks.kind in BLOCK_KINDS else None

    def _rounded(self, name: str) -> "_native.PackedMatrix":
        """Round a matrix to 8 bits piece by piece."""
        from foreword.kernels._native import PackedMatrix

        rows, columns = self._head.spec.shapes[name]
        packed = PackedMatrix.zeros_int8(
            self._arena, rows, columns, rotated_group_size(columns), is_rotated=True
        )
        first_row = 0
        for piece in self._head.pieces(name, piece_rows(columns)):
            packed.round_rows(first_row, piece, self.isa, self._threads)
            first_row += len(piece)
        return packed

    def matrices(self, names: list[str], biased: bool) -> "list[_native.PackedMatrix]":
        """Pack matrices by tensor name, with the biases that they have; `biased` is ignored."""
        return [self.matrix(name.removesuffix(".weight")) for name in names]

    def pack(self, values: Tensor) -> "_native.PackedMatrix":
        """Pack a float32 matrix that was made from a tensor of the head."""
        from foreword.kernels._native import PackedMatrix

        if self._number_format.is_float32:
            packed = PackedMatrix.keep_floats(self._arena, values)
        else:
            group_size = rotated_group_size(values.shape[1])
            packed = PackedMatrix.round_floats(
                self._arena, values, group_size, is_rotated=True, isa=self.isa, threads=self._threads
            )
        self.nbytes += packed.nbytes
        return packed

    def floats(self, name: str, biased: bool = False) -> "_native.PackedMatrix":
        """Pack a matrix in float32."""
        from foreword.kernels._native import PackedMatrix

        packed = PackedMatrix.keep_floats(self._arena, self._head.load(name))
        if biased:
            packed.set_bias(self._head.load(name.removesuffix("weight") + "bias"))
        self.nbytes += packed.nbytes
        return packed

    def optional(self, name: str) -> "_native.PackedMatrix | None":
        """Pack a matrix by module name; None if the head does not have it."""
        return self.matrix(name) if self._head.spec.has(name + ".weight") else None

    def vector(self, name: str) -> Tensor | None:
        """Return a norm or bias, float32 [n]; None if the head has none."""
        return self._head.load(name) if self._head.spec.has(name) else None
