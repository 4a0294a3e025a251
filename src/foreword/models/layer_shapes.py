"""Names and shapes of a decoder's tensors."""

from typing import NamedTuple

from foreword.models.config import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    Norms,
    Recurrence,
    RecurrentSpec,
)

FINAL_NORM = "model.norm.weight"

Shapes = dict[str, tuple[int, ...]]


class NormNames(NamedTuple):
    """Names of a layer's norms; None: the layer has no such norm."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


_NORM_NAMES = {
    Norms.BEFORE: NormNames("input_layernorm", None, "post_attention_layernorm", None),
    Norms.AFTER: NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    Norms.AROUND: NormNames(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}

_SINGLE_NORM = {
    True: NormNames("input_layernorm", None, None, None),
    False: NormNames(None, None, "input_layernorm", None),
}
"""Names of the norms in layers with one sublayer. True: it is attention or a recurrence; False: it is an MLP."""


def norm_names(layer: LayerSpec) -> NormNames:
    """Return the names of a layer's norms; `post_attention_layernorm` is before the MLP in some families."""
    if layer.norms is Norms.SINGLE:
        return _SINGLE_NORM[layer.mixes]
    return _NORM_NAMES[layer.norms]


def expected_shapes(config: ModelConfig) -> Shapes:
    """Return the names and shapes of all tensors of a model."""
    hidden = config.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    by_layer: dict[LayerSpec, Shapes] = {}  # computed once for equal layers
    for index, layer in enumerate(config.layers):
        if layer not in by_layer:
            by_layer[layer] = layer_shapes(layer, hidden)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in by_layer[layer].items()}
    return shapes


def layer_shapes(layer: LayerSpec, hidden: int) -> Shapes:
    """Return the shapes of a layer's tensors, by their names in the layer."""
    shapes: Shapes = {f"{name}.weight": (hidden,) for name in norm_names(layer) if name is not None}
    if layer.recurrent is not None:
        shapes |= _recurrent_shapes(layer.recurrent, hidden)
    elif layer.has_attention and layer.attention.latent is None:
        shapes |= _attention_shapes(layer.attention, hidden)
    elif layer.has_attention:
        shapes |= _latent_shapes(layer.attention, hidden)
    if not layer.has_mlp:
        return shapes
    if layer.mlp.experts is None:
        return shapes | _mlp_shapes("mlp.", layer.mlp, hidden)
    return shapes | _experts_shapes(layer.mlp, hidden)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (rows, columns)}
    return shapes | ({f"{name}.bias": (rows,)} if bias else {})


def recurrent_inputs(spec: RecurrentSpec) -> dict[str, int]:
    """Return input projection -> output width of a recurrent layer, in the order in which the outputs are used."""
    values, heads = spec.value_width, spec.heads
    match spec.kind:
        case Recurrence.DELTA:
            return {"in_proj_qkv": spec.channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        case Recurrence.SSM:
            return {"in_proj_qkv": spec.channels, "in_proj_z": values, "in_proj_a": heads}
        case Recurrence.NONE:
            return {"in_proj": 3 * values}


def _recurrent_shapes(spec: RecurrentSpec, hidden: int) -> Shapes:
    shapes: Shapes = {"linear_attn.conv1d.weight": (spec.channels, 1, spec.kernel)}
    if spec.conv_bias:
        shapes["linear_attn.conv1d.bias"] = (spec.channels,)
    for name, rows in recurrent_inputs(spec).items():
        shapes |= _linear(f"linear_attn.{name}", rows, hidden, spec.bias)
    if spec.kind is not Recurrence.NONE:
        shapes |= {f"linear_attn.{name}": (spec.heads,) for name in ("A_log", "dt_bias")}
        width = spec.value_dim if spec.kind is Recurrence.DELTA else spec.value_width
        shapes["linear_attn.norm.weight"] = (width,)
    if spec.kind is Recurrence.SSM:
        shapes["linear_attn.D"] = (spec.heads,)
    return shapes | _linear("linear_attn.out_proj", hidden, spec.value_width, spec.bias)


def _attention_shapes(spec: AttentionSpec, hidden: int) -> Shapes:
    shapes = {
        **_linear("self_attn.q_proj", spec.query_rows, hidden, spec.bias),
        **_linear("self_attn.k_proj", spec.kv_width, hidden, spec.bias),
        **_linear("self_attn.v_proj", spec.kv_width, hidden, spec.bias),
        **_linear("self_attn.o_proj", hidden, spec.output_width, spec.output_bias),
    }
    if spec.sinks:
        shapes["self_attn.sinks"] = (spec.num_heads,)
    if spec.qk_norm:
        wide = spec.wide_qk_norm
        shapes["self_attn.q_norm.weight"] = (spec.query_width if wide else spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (spec.kv_width if wide else spec.head_dim,)
    return shapes


def _latent_shapes(spec: AttentionSpec, hidden: int) -> Shapes:
    latent = spec.latent
    assert latent is not None
    shapes = {
        **_linear("self_attn.kv_a_proj_with_mqa", latent.row_dim, hidden, spec.bias),
        "self_attn.kv_a_layernorm.weight": (latent.kv_rank,),
        "self_attn.kv_b_proj.weight": (spec.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        **_linear("self_attn.o_proj", hidden, spec.output_width, spec.output_bias),
    }
    if latent.query_rank is None:
        return shapes | {"self_attn.q_proj.weight": (spec.query_width, hidden)}
    return shapes | {
        **_linear("self_attn.q_a_proj", latent.query_rank, hidden, spec.bias),
        "self_attn.q_a_layernorm.weight": (latent.query_rank,),
        "self_attn.q_b_proj.weight": (spec.query_width, latent.query_rank),
    }


def _mlp_shapes(prefix: str, mlp: MlpSpec, hidden: int) -> Shapes:
    gate = _linear(f"{prefix}gate_proj", mlp.intermediate_size, hidden, mlp.bias)
    return {
        **(gate if mlp.gated else {}),
        **_linear(f"{prefix}up_proj", mlp.intermediate_size, hidden, mlp.bias),
        **_linear(f"{prefix}down_proj", hidden, mlp.intermediate_size, mlp.bias),
    }


def _experts_shapes(mlp: MlpSpec, hidden: int) -> Shapes:
    experts = mlp.experts
    assert experts is not None
    shapes = _linear("mlp.gate", experts.count, hidden, experts.bias)
    if experts.corrected:
        shapes["mlp.gate.e_score_correction_bias"] = (experts.count,)
    if mlp.intermediate_size:
        shapes |= _mlp_shapes("mlp.shared_experts.", mlp, hidden)
        if experts.shared_gate:
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    in_expert = _mlp_shapes("", MlpSpec(experts.size, bias=experts.bias, gated=mlp.gated), hidden)
    for index in range(experts.count):
        shapes |= {f"mlp.experts.{index}.{name}": shape for name, shape in in_expert.items()}
    return shapes
