"""Packed LoRA adapters of a decoder on the CPU kernels."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from foreword.backends.cpu.weights import CpuLayer
from foreword.models.adapters import Factors, Lora

if TYPE_CHECKING:
    from foreword.kernels import _native

SITES = 8
"""Matrices of a layer that can be adapted: up to four inputs, the output, gate, up and down."""


def _sites(layer: CpuLayer) -> "Iterator[tuple[int, tuple[str, _native.PackedMatrix]]]":
    """Yield the place, module and matrix of every matrix; without a gate, `up` has its place."""
    mixing, mlp = list(layer.mixing.items()), list(layer.mlp.items())
    yield from enumerate(mixing[:-1])
    yield from zip((4,), mixing[-1:], strict=False)
    yield from zip((5, 6), mlp[:-1], strict=False)
    yield from zip((7,), mlp[-1:], strict=False)


Pair: TypeAlias = "tuple[_native.PackedMatrix, _native.PackedMatrix] | None"


class AdapterPacker:
    """Packs the factors of a LoRA adapter to match the matrices they are added to.

    The inner factor is rounded like its matrix, since both read the same rounded input; the outer one has a scale per
    row. With float matrices, both stay float.
    """

    def __init__(self, isa: str, threads: int, floats: bool) -> None:
        from foreword.kernels import _native

        self._arena = _native.Arena()
        self._isa = isa
        self._threads = threads
        self._floats = floats

    def layers(self, adapter: Lora, layers: tuple[CpuLayer, ...]) -> list[list[Pair]]:
        """Return the packed factors, [layers][places of matrices]."""
        packed: list[list[Pair]] = []
        for index, layer in enumerate(layers):
            places: list[Pair] = [None] * SITES
            for place, (module, matrix) in _sites(layer):
                if (factors := adapter.factors.get((index, module))) is not None:
                    places[place] = self._pair(factors, matrix)
            packed.append(places)
        return packed

    def _pair(self, factors: Factors, matrix: "_native.PackedMatrix") -> Pair:
        from foreword.kernels._native import PackedMatrix

        if self._floats:
            return PackedMatrix.keep_floats(self._arena, factors.down), PackedMatrix.keep_floats(
                self._arena, factors.up
            )
        down = PackedMatrix.round_floats(
            self._arena, factors.down, matrix.group, matrix.form == "int8-rotated", self._isa, self._threads
        )
        return down, PackedMatrix.round_factor(self._arena, factors.up)
