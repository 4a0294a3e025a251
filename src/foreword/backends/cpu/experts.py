"""Mixtures of experts as the CPU kernels read them."""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from foreword.models.config import GroupScore, MlpSpec, Scores

if TYPE_CHECKING:
    from foreword.kernels import _native


class ExpertPacker(Protocol):
    """Packs the tensors of a decoder or of a draft head."""

    def matrices(self, names: list[str], biased: bool) -> "list[_native.PackedMatrix]":
        """Projections of one input."""
        ...

    def floats(self, name: str) -> "_native.PackedMatrix":
        """A matrix that stays in float32."""
        ...

    def vector(self, name: str) -> Tensor | None:
        """float32 [n]."""
        ...


def load_experts(
    packer: ExpertPacker, mlp: MlpSpec, prefix: str
) -> "tuple[_native.Experts, list[_native.PackedMatrix]]":
    """The experts of one layer, and gate, up and down of those that all tokens share, if there are any.

    All that read the same input are packed together, so that they are grouped alike.
    """
    from foreword.kernels import _native

    spec, shared = mlp.experts, mlp.intermediate_size > 0
    assert spec is not None
    parts = [f"{prefix}mlp.experts.{index}." for index in range(spec.count)]
    if shared:
        parts.append(f"{prefix}mlp.shared_experts.")
    readers = packer.matrices(
        [f"{part}{name}.weight" for name in ("gate_proj", "up_proj") for part in parts], mlp.bias
    )
    gates, ups = readers[: len(parts)], readers[len(parts) :]
    downs = packer.matrices([f"{part}down_proj.weight" for part in parts], mlp.bias)
    gate = packer.vector(f"{prefix}mlp.shared_expert_gate.weight") if shared and spec.shared_gate else None
    correction = packer.vector(f"{prefix}mlp.gate.e_score_correction_bias") if spec.corrected else None
    experts = _native.Experts(
        router=packer.floats(f"{prefix}mlp.gate.weight"),
        gate=gates[: spec.count],
        up=ups[: spec.count],
        down=downs[: spec.count],
        per_token=spec.per_token,
        sigmoid=spec.scores is Scores.SIGMOID,
        normalize=spec.normalize,
        scale=spec.scale,
        groups=spec.groups,
        top_groups=spec.top_groups,
        counted=1 if spec.group_score is GroupScore.MAX else 2,
        correction=correction,
        shared_gate=None if gate is None else gate.flatten(),
    )
    return experts, [gates[-1], ups[-1], downs[-1]] if shared else []
