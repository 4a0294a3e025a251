"""Packed layers of a decoder on the CPU kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from foreword.backends.cpu.kv_store import HEAD_ALIGNMENT
from foreword.backends.cpu.latent import load_latent
from foreword.backends.cpu.packing import FORMATS, MatrixPacker, TensorPacker, WeightFormat
from foreword.backends.support import require_supported
from foreword.backends.weight_loader import mixing_names
from foreword.errors import CheckpointError
from foreword.kernels.native import choose_isa, native_status
from foreword.kv.chunks import StateSizes
from foreword.models.config import (
    CLAMPED_SLOPE,
    GroupScore,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    Recurrence,
    RecurrentSpec,
    RopeSpec,
    Scores,
)
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.layer_shapes import FINAL_NORM, norm_names
from foreword.models.rope import frequencies

if TYPE_CHECKING:
    from foreword.kernels import _native

_RECURRENCE_NAMES = {Recurrence.DELTA: "delta", Recurrence.SSM: "ssm", Recurrence.NONE: "convolution"}


@dataclass(frozen=True)
class CpuLayer:
    """Packed weights of one layer."""

    attention_norm: Tensor | None  # None: no norm
    mlp_norm: Tensor | None
    # By module name: input projections of attention or a recurrence, then the output projection; empty: only an MLP.
    mixing: "dict[str, _native.PackedMatrix]"
    # By module name: gate (not with a squared ReLU), up, down; in a mixture those of the shared experts.
    mlp: "dict[str, _native.PackedMatrix]"
    query_norm: Tensor | None
    key_norm: Tensor | None
    recurrent: "_native.Recurrent | None" = None
    experts: "_native.Experts | None" = None
    post_attention_norm: Tensor | None = None  # norms of the sublayers' outputs
    post_mlp_norm: Tensor | None = None
    sinks: Tensor | None = None
    latent: "_native.Latent | None" = None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        matrices = sum(matrix.nbytes for matrix in (*self.mixing.values(), *self.mlp.values()))
        return matrices + sum(part.nbytes for part in (self.experts, self.latent) if part is not None)


@dataclass(frozen=True)
class CpuWeights:
    """Packed weights of a decoder; several decoders may share them."""

    layers: tuple[CpuLayer, ...]
    embedding: "_native.PackedMatrix"
    head: "_native.PackedMatrix"
    final_norm: Tensor

    @property
    def layer_bytes(self) -> int:
        """Bytes of the layers' matrices."""
        return sum(layer.nbytes for layer in self.layers)

    def new_states(self, sizes: StateSizes) -> "_native.StateStore | None":
        """Allocate the memory of recurrent layers; None if there are none."""
        from foreword.kernels import _native

        recurrent = [layer.recurrent for layer in self.layers if layer.recurrent is not None]
        if not recurrent:
            return None
        return _native.StateStore(recurrent[0], len(recurrent), sizes.states, sizes.rings)

    def with_layers(self, layers: Sequence[int]) -> "CpuWeights":
        """Return these layers with the same embedding, head and final norm."""
        return replace(self, layers=tuple(self.layers[layer] for layer in layers))

    def followed_by(
        self, checkpoint: Checkpoint, number_format: WeightFormat, isa: str, threads: int
    ) -> "CpuWeights":
        """Return these layers, then another checkpoint's layers and final norm.

        The few added layers are stored in 8 bits at least, which costs little memory.
        """
        added_format = number_format if number_format.is_float32 else FORMATS["int8"]
        packer = MatrixPacker(checkpoint, added_format, isa, threads, progress=None)
        layers = (*self.layers, *load_layers(packer, checkpoint.config))
        return replace(self, layers=layers, final_norm=packer.vector(FINAL_NORM))


def load_outer_matrices(packer: MatrixPacker, config: ModelConfig) -> CpuWeights:
    """Return weights with embedding, head and final norm, but without layers."""
    embedding = packer.matrices(["model.embed_tokens.weight"], biased=False)[0]
    head = embedding if config.tied_embeddings else packer.matrices(["lm_head.weight"], biased=False)[0]
    return CpuWeights((), embedding, head, packer.vector(FINAL_NORM))


def load_layers(packer: MatrixPacker, config: ModelConfig) -> tuple[CpuLayer, ...]:
    require_supported(config)
    return tuple(
        _load_layer(packer, layer, f"model.layers.{index}.") for index, layer in enumerate(config.layers)
    )


def _load_layer(packer: MatrixPacker, layer: LayerSpec, prefix: str) -> CpuLayer:
    def matrices(names: Sequence[str], biased: bool) -> "dict[str, _native.PackedMatrix]":
        packed = packer.matrices([f"{prefix}{name}.weight" for name in names], biased)
        return dict(zip(names, packed, strict=True))

    def norm(name: str | None) -> Tensor | None:
        return None if name is None else packer.vector(f"{prefix}{name}.weight")

    norms, attention, names = norm_names(layer), layer.attention, mixing_names(layer)
    experts: _native.Experts | None = None
    mlp: dict[str, _native.PackedMatrix] = {}
    if layer.mlp.experts is not None:
        experts, shared = load_experts(packer, layer.mlp, prefix)
        mlp = {f"mlp.shared_experts.{index}": matrix for index, matrix in enumerate(shared)}
    elif layer.has_mlp:
        inputs = ("mlp.gate_proj", "mlp.up_proj") if layer.mlp.gated else ("mlp.up_proj",)
        mlp = matrices(inputs, layer.mlp.bias) | matrices(["mlp.down_proj"], layer.mlp.bias)
    mixing: dict[str, _native.PackedMatrix] = {}
    if layer.mixes:
        mixing = matrices(names.inputs, names.has_bias) | matrices(names.output, names.has_output_bias)
    return CpuLayer(
        attention_norm=norm(norms.before_attention),
        mlp_norm=norm(norms.before_mlp),
        mixing=mixing,
        mlp=mlp,
        query_norm=norm(names.query_norm if layer.has_attention else None),
        key_norm=norm(names.key_norm if layer.has_attention else None),
        recurrent=None if layer.recurrent is None else _load_recurrent(packer, layer.recurrent, prefix),
        experts=experts,
        post_attention_norm=norm(norms.after_attention),
        post_mlp_norm=norm(norms.after_mlp),
        sinks=packer.vector(f"{prefix}self_attn.sinks") if attention.sinks and layer.has_attention else None,
        latent=load_latent(packer, attention, prefix) if layer.has_attention else None,
    )


def _load_recurrent(packer: MatrixPacker, spec: RecurrentSpec, prefix: str) -> "_native.Recurrent":
    from foreword.kernels import _native

    has_state, is_mamba2 = spec.kind is not Recurrence.NONE, spec.kind is Recurrence.SSM
    if spec.value_dim % HEAD_ALIGNMENT:
        raise CheckpointError(
            f"the CPU kernels need heads of a multiple of {HEAD_ALIGNMENT} values in recurrent layers, "
            f"not {spec.value_dim}; use --backend torch"
        )

    def vector(name: str, is_present: bool) -> Tensor | None:
        return packer.vector(f"{prefix}linear_attn.{name}") if is_present else None

    log_rate = vector("A_log", has_state)
    conv = packer.vector(f"{prefix}linear_attn.conv1d.weight")  # [channels, 1, kernel]
    return _native.Recurrent(
        kind=_RECURRENCE_NAMES[spec.kind],
        kernel_size=spec.kernel,
        heads=spec.heads,
        value_dim=spec.value_dim,
        key_heads=spec.key_heads,
        key_dim=spec.key_dim,
        conv=conv.squeeze(1).T.contiguous().flatten(),  # [kernel, channels]
        conv_bias=vector("conv1d.bias", spec.conv_bias),
        norm=vector("norm.weight", has_state),
        log_decay_rates=None if log_rate is None else -log_rate.exp(),
        time_bias=vector("dt_bias", has_state),
        skip=vector("D", is_mamba2),
        norm_groups=spec.norm_groups,
        time_step_limits=spec.time_limits,
    )


def load_experts(
    packer: TensorPacker, mlp: MlpSpec, prefix: str
) -> "tuple[_native.Experts, list[_native.PackedMatrix]]":
    """Return the experts of one layer, and the matrices of its shared experts: gate (if any), up, down; or none.

    Matrices with the same input are packed together, in formats that share the input.
    """
    from foreword.kernels import _native

    spec, has_shared = mlp.experts, mlp.intermediate_size > 0
    assert spec is not None
    prefixes = [f"{prefix}mlp.experts.{index}." for index in range(spec.count)]
    if has_shared:
        prefixes.append(f"{prefix}mlp.shared_experts.")
    # The activation is applied to the first. Without a gate, it is `up_proj`, and `ups` is empty.
    names = ("gate_proj", "up_proj") if mlp.gated else ("up_proj",)
    gates_and_ups = packer.matrices(
        [f"{expert}{name}.weight" for name in names for expert in prefixes], mlp.bias or spec.bias
    )
    gates, ups = gates_and_ups[: len(prefixes)], gates_and_ups[len(prefixes) :]
    downs = packer.matrices([f"{expert}down_proj.weight" for expert in prefixes], mlp.bias or spec.bias)
    has_gate = has_shared and spec.shared_gate
    shared_gate = packer.vector(f"{prefix}mlp.shared_expert_gate.weight") if has_gate else None
    correction = packer.vector(f"{prefix}mlp.gate.e_score_correction_bias") if spec.corrected else None
    experts = _native.Experts(
        router=packer.floats(f"{prefix}mlp.gate.weight", spec.bias),
        gate=gates[: spec.count],
        up=ups[: spec.count],
        down=downs[: spec.count],
        per_token=spec.per_token,
        uses_sigmoid=spec.scores is Scores.SIGMOID,
        normalizes=spec.normalize,
        scale=spec.scale,
        groups=spec.groups,
        top_groups=spec.top_groups,
        group_top_experts=1 if spec.group_score is GroupScore.MAX else 2,
        correction=correction,
        shared_gate=None if shared_gate is None else shared_gate.flatten(),
    )
    if spec.clamp is not None:
        experts.set_clamp(spec.clamp, CLAMPED_SLOPE)
    shared = [gates[-1], *ups[-1:], downs[-1]] if has_shared else []
    return experts, shared


def native_decoder(config: ModelConfig, weights: CpuWeights, threads: int) -> "_native.Decoder":
    """Create the compiled decoder of packed weights."""
    from foreword.kernels import _native

    layer = require_supported(config)
    decoder = _native.Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=max(spec.mlp.intermediate_size for spec in config.layers),
        num_heads=layer.attention.num_heads,
        num_kv_heads=layer.attention.num_kv_heads,
        head_dim=layer.attention.head_dim,
        rms_norm_eps=config.norm.eps,
        magnitude=config.rope.magnitude,
        inverse_frequencies=frequencies(config.rope, layer.attention.rotary_dim).contiguous(),
        isa=choose_isa(native_status().instruction_sets),
        threads=threads,
        embedding_scale=config.embedding_scale,
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap or 0.0,
    )
    rope_indices = _add_ropes(decoder, config)
    for packed, spec in zip(weights.layers, config.layers, strict=True):
        decoder.add_layer(
            packed.attention_norm,
            packed.mlp_norm,
            list(packed.mixing.values()),
            list(packed.mlp.values()),
            packed.query_norm,
            packed.key_norm,
            experts=packed.experts,
            window=spec.attention.window or 0,
            has_rope=spec.attention.is_rotated,
            score_scale=spec.attention.scale or 0.0,
            post_attention_norm=packed.post_attention_norm,
            post_mlp_norm=packed.post_mlp_norm,
            residual_scale=spec.residual_scale,
            rope_index=rope_indices[spec.attention.rope],
            softcap=spec.attention.softcap or 0.0,
            activation=spec.mlp.activation,
            recurrent=packed.recurrent,
            latent=packed.latent,
        )
        if packed.sinks is not None:
            decoder.set_sinks(packed.sinks)
    decoder.set_embedding_and_output(weights.embedding, weights.head, weights.final_norm)
    return decoder


def _add_ropes(decoder: "_native.Decoder", config: ModelConfig) -> dict[RopeSpec | None, int]:
    """Add the layers' rotary embeddings to the decoder; return the index of each. None is the model's default, 0."""
    ropes = dict.fromkeys(layer.attention.rope for layer in config.layers if layer.attention.rope)
    dim = config.layers[0].attention.rotary_dim
    return {None: 0} | {
        rope: decoder.add_rope(frequencies(rope, dim).contiguous(), rope.magnitude) for rope in ropes
    }
