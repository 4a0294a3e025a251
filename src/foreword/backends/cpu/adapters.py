"""Packed LoRA adapters of a decoder on the CPU kernels."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from foreword.backends.cpu.weights import CpuLayer
from foreword.models.adapters import Factors, Lora

if TYPE_CHECKING:
    from foreword.kernels import _native

SITES = 8
"""Matrices of a layer that can be adapted: up to four input projections, the output projection, gate, up and down."""

_OUTPUT, _GATE, _DOWN = 4, 5, 7  # sites, as in native/adapter.h


def _sites(layer: CpuLayer) -> "Iterator[tuple[int, tuple[str, _native.PackedMatrix]]]":
    """Yield (site, (module, matrix)) of every matrix of a layer. An MLP without a gate has `up` at the gate's site."""
    mixing, mlp = list(layer.mixing.items()), list(layer.mlp.items())
    yield from enumerate(mixing[:-1])
    if mixing:
        yield _OUTPUT, mixing[-1]
    yield from enumerate(mlp[:-1], start=_GATE)
    if mlp:
        yield _DOWN, mlp[-1]


PackedFactors: TypeAlias = "tuple[_native.PackedMatrix, _native.PackedMatrix] | None"
"""The factors A and B of one matrix; None: it is not adapted."""


class AdapterPacker:
    """Packs the factors of a LoRA adapter to match the matrices they are added to.

    The inner factor A is rounded like the adapted matrix, because both read the same rounded input. The outer factor
    B is rounded with one scale per row. If the decoder's matrices are float32, both factors are, too.
    """

    def __init__(self, isa: str, threads: int, is_float32: bool) -> None:
        from foreword.kernels import _native

        self._arena = _native.Arena()
        self._isa = isa
        self._threads = threads
        self._is_float32 = is_float32

    def layers(self, adapter: Lora, layers: tuple[CpuLayer, ...]) -> list[list[PackedFactors]]:
        """Return the packed factors, [layers][SITES]."""
        packed: list[list[PackedFactors]] = []
        for index, layer in enumerate(layers):
            by_site: list[PackedFactors] = [None] * SITES
            for site, (module, matrix) in _sites(layer):
                if (factors := adapter.factors.get((index, module))) is not None:
                    by_site[site] = self._pack(factors, matrix)
            packed.append(by_site)
        return packed

    def _pack(self, factors: Factors, matrix: "_native.PackedMatrix") -> PackedFactors:
        from foreword.kernels._native import PackedMatrix

        if self._is_float32:
            down = PackedMatrix.keep_floats(self._arena, factors.down)
            return down, PackedMatrix.keep_floats(self._arena, factors.up)
        down = PackedMatrix.round_floats(
            self._arena,
            factors.down,
            matrix.group_size,
            is_rotated=matrix.format == "int8-rotated",
            isa=self._isa,
            threads=self._threads,
        )
        return down, PackedMatrix.round_factor(self._arena, factors.up)
