"""Converts config.json to a ModelConfig."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreword.models.architectures.architecture import Architecture, ConfigSwitch, WindowedLayers, WindowField
from foreword.models.architectures.registry import family_named
from foreword.models.config import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, ModelConfig, Norms, NormSpec
from foreword.models.formats.fields import ConfigFields, check_experts, check_heads, check_layers
from foreword.models.formats.hf.layers import (
    LayerKind,
    dense_layers,
    experts_spec,
    layer_kinds,
    recurrent_spec,
    shared_size,
)
from foreword.models.formats.hf.layers import num_layers as num_layers_stated
from foreword.models.formats.hf.rope import extended_context, local_rope_spec, rope_spec, score_factor

_KINDS = ("full_attention", "sliding_attention")


def has(fields: ConfigFields, switch: ConfigSwitch) -> bool:
    """Return whether a model has the feature of the switch."""
    return switch.always or (switch.key is not None and fields.flag(switch.key, switch.default))


def layer_specs(fields: ConfigFields, family: Architecture, count: int) -> tuple[LayerSpec, ...]:
    """Return the descriptions of all `count` layers; equal layers share one object."""
    attention, sparse = attention_spec(fields, family), _experts_mlp(fields, family)
    dense = set(range(count)) if sparse is None else dense_layers(fields, family.experts, count)
    rotated = _rotated(fields, family, count)
    windowed = _windowed_layers(fields, family.window, rotated, count, family.recurrent is not None)
    width = _window(fields) if any(windowed) else None
    local_rope = local_rope_spec(fields, family.rope)
    residual = fields.number(family.scales.residual, 1.0) if family.scales.residual else 1.0
    recurrent = None if family.recurrent is None else recurrent_spec(fields, family.recurrent)
    kinds = layer_kinds(fields, family, count)
    mlp = _mlp(fields, family, is_used=bool(dense) or LayerKind.MLP in kinds)
    specs: dict[tuple[object, ...], LayerSpec] = {}  # by the properties in which layers differ
    layers = []
    for index in range(count):
        properties = windowed[index], rotated[index], index in dense, kinds[index]
        if properties not in specs:
            layer_attention = replace(
                attention,
                window=width if windowed[index] else None,
                is_rotated=rotated[index],
                rope=local_rope if windowed[index] else None,
            )
            layer_mlp = mlp if index in dense or sparse is None else sparse
            layer = LayerSpec(layer_attention, layer_mlp, family.norms, residual)
            if kinds[index] is LayerKind.RECURRENT:
                layer = replace(layer, recurrent=recurrent)
            is_single = family.norms is Norms.SINGLE
            specs[properties] = _single_sublayer(layer, kinds[index], mlp) if is_single else layer
        layers.append(specs[properties])
    return tuple(layers)


def _single_sublayer(layer: LayerSpec, kind: LayerKind, mlp: MlpSpec) -> LayerSpec:
    """Return the layer with only the sublayer that its kind names."""
    match kind:
        case LayerKind.MLP:
            return replace(layer, mlp=mlp, mixes=False)
        case LayerKind.EXPERTS:
            return replace(layer, mixes=False)
        case _:
            return replace(layer, mlp=replace(mlp, intermediate_size=0))


def layer_after_last(fields: ConfigFields, family: Architecture) -> LayerSpec:
    """Return the layer of an MTP module, which has full attention, and experts if the family has experts."""
    mlp = _experts_mlp(fields, family) or _mlp(fields, family)
    return LayerSpec(attention_spec(fields, family), mlp, family.norms)


def attention_spec(fields: ConfigFields, family: Architecture) -> AttentionSpec:
    """Return the attention that all layers have in common, without a window."""
    heads = fields.count("num_attention_heads")
    latent = latent_spec(fields) if family.is_latent else None
    kv_heads = fields.count("num_key_value_heads", heads if family.kv_heads_may_be_missing else None)
    if latent is None:
        dim = fields.count("head_dim", fields.count("hidden_size") // heads or None)
    else:
        dim, kv_heads = latent.nope_dim + latent.rope_dim, heads
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        bias=has(fields, family.attention_bias),
        output_bias=has(fields, family.output_bias),
        qk_norm=has(fields, family.qk_norm),
        wide_qk_norm=family.wide_qk_norm,
        scale=_score_scale(fields, family, dim),
        softcap=fields.optional_number(family.scales.attention_cap),
        latent=latent,
        gated=family.has_gated_attention,
        sinks=family.has_sinks,
    )
    return check_heads(spec, fields.origin)


def latent_spec(fields: ConfigFields) -> LatentSpec:
    """Return the sizes of latent attention."""
    rank = None if fields.get("q_lora_rank") is None else fields.count("q_lora_rank")
    spec = LatentSpec(
        kv_rank=fields.count("kv_lora_rank"),
        query_rank=rank,
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"),
        value_dim=fields.count("v_head_dim"),
    )
    if spec.rope_dim % 2:
        raise fields.malformed("qk_rope_head_dim", "even")
    return spec


def _score_scale(fields: ConfigFields, family: Architecture, head_dim: int) -> float | None:
    """Return the factor of attention scores; None: 1 / sqrt(head_dim)."""
    if family.scales.attention is not None:
        return fields.number(family.scales.attention, 1.0)
    if family.scales.attention_root is not None:
        return float(fields.number(family.scales.attention_root, 256.0) ** -0.5)
    if family.is_latent and (factor := score_factor(fields, family.rope)) != 1.0:
        return float(head_dim**-0.5 * factor)
    return None


def _mlp(fields: ConfigFields, family: Architecture, *, is_used: bool = True) -> MlpSpec:
    """Return the MLP of layers without experts; if no layer uses it, its size may be missing."""
    return MlpSpec(
        intermediate_size=_mlp_size(fields, family) if is_used else 0,
        bias=has(fields, family.mlp_bias),
        activation=fields.text(family.activation_key, family.activation),
        gated=not family.ungated_mlp,
    )


def _mlp_size(fields: ConfigFields, family: Architecture) -> int:
    """Return the MLP's size; in LFM2, two thirds of the stated size, scaled and rounded up to a multiple."""
    size = fields.count(family.mlp_size)
    if not family.adjusted_mlp:
        return size
    size = fields.count("block_ff_dim", size)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.count("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _experts_mlp(fields: ConfigFields, family: Architecture) -> MlpSpec | None:
    """Return the MLP of layers with experts: its own size is the shared expert's. None: the family has no experts."""
    if family.experts is None:
        return None
    keys = family.experts
    if fields.get("moe_latent_size") is not None:
        raise fields.unsupported("a compressed input of experts (moe_latent_size)")
    experts = experts_spec(fields, keys, has(fields, keys.normalize))
    return MlpSpec(
        intermediate_size=shared_size(fields, keys, experts),
        bias=has(fields, family.mlp_bias),
        activation=fields.text(family.activation_key, family.activation),
        gated=not family.ungated_mlp,
        experts=experts,
    )


def _rotated(fields: ConfigFields, family: Architecture, count: int) -> list[bool]:
    """Return whether each layer has rotary embedding."""
    period = family.rope.unrotated_every
    if family.rope.by_type and fields.get("position_embedding_type") != "rope":
        return [False] * count
    if period is None:
        return [True] * count
    listed = fields.get("no_rope_layers")
    if listed is None:
        period = fields.count("no_rope_layer_interval", period)
        return [(index + 1) % period != 0 for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count or any(entry not in (0, 1) for entry in listed):
        raise fields.malformed("no_rope_layers", f"a list of {count} ones and zeros")
    return [bool(entry) for entry in listed[:count]]


def _window(fields: ConfigFields) -> int | None:
    """Return the window size; None if there is none, or if it is as long as the context."""
    if fields.get("sliding_window") is None:
        return None
    width = fields.count("sliding_window")
    return width if width < fields.count("max_position_embeddings") else None


def _windowed_layers(
    fields: ConfigFields, rule: WindowField | None, rotated: list[bool], count: int, is_hybrid: bool
) -> list[bool]:
    """Return whether each layer has a sliding window. In hybrid models `layer_types` has other names."""
    listed = None if is_hybrid else _layer_types(fields, count)
    if rule is None or (rule.switch is not None and not fields.flag(rule.switch, False)):
        if listed is not None and rule is None and "sliding_attention" in listed:
            raise fields.unsupported("a sliding window in this family (layer_types)")
        return [False] * count
    if listed is not None and rule.listed:
        return [kind == "sliding_attention" for kind in listed]
    return _windowed(fields, rule, rotated, count)


def _layer_types(fields: ConfigFields, count: int) -> list[str] | None:
    """Return `layer_types` of a model without recurrent layers, checked; None if it is missing."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(kind, str) for kind in kinds):
        raise fields.malformed("layer_types", f"a list of {count} names")
    if unknown := sorted(set(kinds) - set(_KINDS)):
        raise fields.unsupported(f"a layer of type {unknown[0]!r}")
    return kinds


def _windowed(fields: ConfigFields, rule: WindowField, rotated: list[bool], count: int) -> list[bool]:
    """Return whether each layer has a sliding window, by the family's rule."""
    match rule.layers:
        case WindowedLayers.ALL:
            return [True] * count
        case WindowedLayers.LAST:
            first = fields.whole("max_window_layers", 28)
            return [index >= first for index in range(count)]
        case WindowedLayers.ALL_BUT_EVERY_NTH:
            period = rule.period if rule.period_key is None else fields.count(rule.period_key, rule.period)
            return [(index + 1) % period != 0 for index in range(count)]
        case WindowedLayers.UNROTATED:
            return [not is_rotated for is_rotated in rotated]


LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")  # prefix of a layer's tensors; group 1 is the layer index


def hf_family(values: Mapping[str, Any], path: Path) -> Architecture:
    """Return the family of a config.json, in the variant that the config describes."""
    family = family_named(values, str(path))
    counts = () if family.experts is None else family.experts.count
    if family.without_experts is not None and not any(values.get(key) for key in counts):
        return family.without_experts
    if family.rope.interleaved and not ConfigFields(values, str(path)).flag("rope_interleave", True):
        return replace(family, rope=replace(family.rope, interleaved=False))
    return family


def hf_config(values: Mapping[str, Any], names: frozenset[str], path: Path) -> ModelConfig:
    """Return the config of a model from its config.json and the canonical names of its tensors."""
    return model_config(ConfigFields(values, str(path)), hf_family(values, path), names)


def model_config(fields: ConfigFields, family: Architecture, names: frozenset[str]) -> ModelConfig:
    """Return the config of a model of this family, and check it against the canonical names of its tensors."""
    num_layers = check_layers(names, LAYER, num_layers_stated(fields, family), fields.origin)
    attention = attention_spec(fields, family)
    rope = rope_spec(fields, family.rope, attention.rotary_dim)
    layers = layer_specs(fields, family, num_layers)
    check_experts(names, layers, fields.origin)
    return ModelConfig(
        architecture=family.name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        context_length=extended_context(fields.count("max_position_embeddings"), rope),
        layers=layers,
        norm=NormSpec(fields.number(family.norm_eps)),
        rope=rope,
        tied_embeddings=fields.flag("tie_word_embeddings", "lm_head.weight" not in names),
        embedding_scale=_embedding_scale(fields, family),
        logit_scale=1 / (fields.optional_number(family.scales.logits_divisor) or 1.0),
        logit_softcap=fields.optional_number(family.scales.logits_cap),
    )


def _embedding_scale(fields: ConfigFields, family: Architecture) -> float:
    if family.scales.embedding_by_width:
        return math.sqrt(fields.count("hidden_size"))
    return fields.optional_number(family.scales.embedding) or 1.0
