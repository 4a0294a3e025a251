"""Adapters as the CPU kernels read them."""

from typing import TYPE_CHECKING, TypeAlias

from foreword.models.adapters import MODULES, Factors, Lora

if TYPE_CHECKING:
    from foreword.backends.cpu.decoder import CpuLayer
    from foreword.kernels import _native

Pair: TypeAlias = "tuple[_native.PackedMatrix, _native.PackedMatrix] | None"


class AdapterPacker:
    """Packs the factors of one adapter beside the matrices that they are added to.

    The inner factor is rounded as its matrix is, since both read the same rounded input; the outer one has a scale
    for every row. Where the matrices are floats, both stay floats.
    """

    def __init__(self, isa: str, threads: int, floats: bool) -> None:
        from foreword.kernels import _native

        self._arena = _native.Arena()
        self._isa = isa
        self._threads = threads
        self._floats = floats

    def layers(self, adapter: Lora, layers: "tuple[CpuLayer, ...]") -> list[list[Pair]]:
        """[layers][modules]."""
        return [
            [
                self._pair(adapter.factors.get((index, module)), matrix)
                for module, matrix in zip(MODULES, layer.matrices, strict=True)
            ]
            for index, layer in enumerate(layers)
        ]

    def _pair(self, factors: Factors | None, matrix: "_native.PackedMatrix") -> Pair:
        from foreword.kernels._native import PackedMatrix

        if factors is None:
            return None
        if self._floats:
            return PackedMatrix.keep_floats(self._arena, factors.down), PackedMatrix.keep_floats(
                self._arena, factors.up
            )
        down = PackedMatrix.round_floats(
            self._arena, factors.down, matrix.group, matrix.form == "int8-rotated", self._isa, self._threads
        )
        return down, PackedMatrix.round_factor(self._arena, factors.up)
