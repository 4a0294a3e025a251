"""Converts config.json to a ModelConfig."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreword.models.architectures.architecture import (
    Architecture,
    ConfigSwitch,
    DenseLayers,
    ExpertKeys,
    Grouping,
    WindowedLayers,
    WindowField,
)
from foreword.models.config import (
    AttentionSpec,
    ExpertsSpec,
    GroupScore,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    NormSpec,
)
from foreword.models.formats.families import family_named
from foreword.models.formats.fields import (
    MAX_DIMENSION,
    ConfigFields,
    check_experts,
    check_heads,
    check_layers,
)
from foreword.models.formats.hf.rope import extended_context, local_rope_spec, rope_spec, score_factor


def experts_spec(fields: ConfigFields, keys: ExpertKeys, normalize: bool) -> ExpertsSpec:
    """Return the routed experts of a layer."""
    if keys.normalize.key is None and not keys.normalize.always and fields.flag("norm_topk_prob", False):
        raise fields.unsupported("normalised weights of experts in this family (norm_topk_prob)")
    _require(fields, "scoring_func", keys.scores.value)
    groups, top_groups = _groups(fields, keys)
    spec = ExpertsSpec(
        count=fields.count(next((key for key in keys.count if fields.get(key) is not None), keys.count[0])),
        per_token=fields.count(keys.per_token),
        size=fields.count(keys.size),
        scores=keys.scores,
        normalize=normalize,
        scale=1.0 if keys.scale is None else fields.number(keys.scale, 1.0),
        corrected=keys.corrected,
        groups=groups,
        top_groups=top_groups,
        group_score=keys.group_score,
        shared_gate=keys.shared_gate,
        bias=keys.bias,
        clamp=optional_number(fields, keys.clamp),
    )
    return _checked(fields, keys, spec)


def shared_size(fields: ConfigFields, keys: ExpertKeys, experts: ExpertsSpec) -> int:
    """Return the width of the shared expert; 0: none."""
    if keys.shared_size is not None:
        return fields.count(keys.shared_size)
    if keys.shared_count is None:
        return 0
    size = fields.whole(keys.shared_count, 0) * experts.size
    if size > MAX_DIMENSION:
        raise fields.malformed(keys.shared_count, "a number of experts")
    return size


def dense_layers(fields: ConfigFields, keys: ExpertKeys | None, count: int) -> set[int]:
    """Return the layers without experts."""
    if keys is None or keys.dense is DenseLayers.NONE:
        return set()
    if keys.dense is DenseLayers.FIRST:
        if fields.count("moe_layer_freq", 1) != 1:
            raise fields.unsupported("layers without experts between others (moe_layer_freq)")
        return set(range(min(count, fields.whole("first_k_dense_replace", 0))))
    step, named = fields.count("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(index, int) for index in named):
        raise fields.malformed("mlp_only_layers", "a list of layers")
    return {index for index in range(count) if index in named or (index + 1) % step}


def _groups(fields: ConfigFields, keys: ExpertKeys) -> tuple[int, int]:
    """Return the number of expert groups, and of groups that a token may select from."""
    if keys.grouping is Grouping.BY_METHOD:
        method = fields.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.unsupported(f"choosing experts by {method!r} (topk_method)")
        if method == "greedy":
            return 1, 1
    elif keys.grouping is Grouping.NONE:
        return 1, 1
    else:
        _require(fields, "topk_method", "noaux_tc")
    groups = 1 if fields.get("n_group") is None else fields.count("n_group")
    return groups, groups if fields.get("topk_group") is None else fields.count("topk_group")


def _require(fields: ConfigFields, key: str, expected: str) -> None:
    if fields.text(key, expected) != expected:
        raise fields.unsupported(f"{key} {fields.get(key)!r} in this family")


def _checked(fields: ConfigFields, keys: ExpertKeys, spec: ExpertsSpec) -> ExpertsSpec:
    if spec.count % spec.groups:
        raise fields.malformed("n_group", f"a number that divides {spec.count} experts")
    if spec.top_groups > spec.groups:
        raise fields.malformed("topk_group", f"at most {spec.groups}, the number of groups")
    each = spec.count // spec.groups
    if spec.group_score is GroupScore.TOP2 and each < 2:
        raise fields.malformed("n_group", "few enough groups for two experts each")
    if spec.per_token > each * spec.top_groups:
        raise fields.malformed(
            keys.per_token, f"at most {each * spec.top_groups}, the experts to choose from"
        )
    return spec


_KINDS = ("full_attention", "sliding_attention")


def has(fields: ConfigFields, switch: ConfigSwitch) -> bool:
    """Return whether the model has this feature."""
    return switch.always or (switch.key is not None and fields.flag(switch.key, switch.default))


def layer_specs(fields: ConfigFields, family: Architecture, count: int) -> tuple[LayerSpec, ...]:
    """Return the specs of all layers."""
    attention, mlp = attention_spec(fields, family), _mlp(fields, family)
    sparse = _experts_mlp(fields, family)
    dense = set(range(count)) if sparse is None else dense_layers(fields, family.experts, count)
    rotated = _rotated(fields, family, count)
    windowed = _windowed_layers(fields, family.window, rotated, count)
    width = _window(fields) if any(windowed) else None
    local_rope = local_rope_spec(fields, family.rope)
    residual = fields.number(family.scales.residual, 1.0) if family.scales.residual else 1.0
    kinds: dict[tuple[bool, bool, bool], LayerSpec] = {}
    layers = []
    for index in range(count):
        kind = windowed[index], rotated[index], index in dense
        if kind not in kinds:
            own = replace(
                attention,
                window=width if windowed[index] else None,
                is_rotated=rotated[index],
                rope=local_rope if windowed[index] else None,
            )
            halves = own, mlp if index in dense or sparse is None else sparse
            kinds[kind] = LayerSpec(*halves, family.norms, residual)
        layers.append(kinds[kind])
    return tuple(layers)


def layer_after_last(fields: ConfigFields, family: Architecture) -> LayerSpec:
    """Return the spec of an MTP module: one more layer after the last."""
    mlp = _experts_mlp(fields, family) or _mlp(fields, family)
    return LayerSpec(attention_spec(fields, family), mlp, family.norms)


def attention_spec(fields: ConfigFields, family: Architecture) -> AttentionSpec:
    """Return the common part of all layers' attention."""
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
        softcap=optional_number(fields, family.scales.attention_cap),
        latent=latent,
        sinks=family.has_sinks,
    )
    return check_heads(spec, fields.origin)


def latent_spec(fields: ConfigFields) -> LatentSpec:
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


def optional_number(fields: ConfigFields, key: str | None) -> float | None:
    return None if key is None or fields.get(key) is None else fields.number(key)


def _score_scale(fields: ConfigFields, family: Architecture, head_dim: int) -> float | None:
    if family.scales.attention is not None:
        return fields.number(family.scales.attention, 1.0)
    if family.scales.attention_root is not None:
        return float(fields.number(family.scales.attention_root, 256.0) ** -0.5)
    if family.is_latent and (factor := score_factor(fields, family.rope)) != 1.0:
        return float(head_dim**-0.5 * factor)
    return None


def _mlp(fields: ConfigFields, family: Architecture) -> MlpSpec:
    return MlpSpec(
        intermediate_size=fields.count("intermediate_size"),
        bias=has(fields, family.mlp_bias),
        activation=fields.text(family.activation_key, family.activation),
    )


def _experts_mlp(fields: ConfigFields, family: Architecture) -> MlpSpec | None:
    """Return the MLP of layers with experts; its own width is the shared expert's."""
    if family.experts is None:
        return None
    keys = family.experts
    experts = experts_spec(fields, keys, has(fields, keys.normalize))
    return MlpSpec(
        intermediate_size=shared_size(fields, keys, experts),
        bias=has(fields, family.mlp_bias),
        activation=fields.text(family.activation_key, family.activation),
        experts=experts,
    )


def _rotated(fields: ConfigFields, family: Architecture, count: int) -> list[bool]:
    """Return which layers have rotary embedding."""
    every = family.rope.unrotated_every
    if every is None:
        return [True] * count
    listed = fields.get("no_rope_layers")
    if listed is None:
        every = fields.count("no_rope_layer_interval", every)
        return [(index + 1) % every != 0 for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count or any(entry not in (0, 1) for entry in listed):
        raise fields.malformed("no_rope_layers", f"a list of {count} ones and zeros")
    return [bool(entry) for entry in listed[:count]]


def _window(fields: ConfigFields) -> int | None:
    """Return the window size; None if it is as long as the context."""
    if fields.get("sliding_window") is None:
        return None
    width = fields.count("sliding_window")
    return width if width < fields.count("max_position_embeddings") else None


def _windowed_layers(
    fields: ConfigFields, rule: WindowField | None, rotated: list[bool], count: int
) -> list[bool]:
    listed = _layer_types(fields, count)
    if rule is None or (rule.switch is not None and not fields.flag(rule.switch, False)):
        if listed is not None and rule is None and "sliding_attention" in listed:
            raise fields.unsupported("a sliding window in this family (layer_types)")
        return [False] * count
    if listed is not None and rule.listed:
        return [kind == "sliding_attention" for kind in listed]
    return _windowed(fields, rule, rotated, count)


def _layer_types(fields: ConfigFields, count: int) -> list[str] | None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(kind, str) for kind in kinds):
        raise fields.malformed("layer_types", f"a list of {count} names")
    if unknown := sorted(set(kinds) - set(_KINDS)):
        raise fields.unsupported(f"a layer of type {unknown[0]!r}")
    return kinds


def _windowed(fields: ConfigFields, rule: WindowField, rotated: list[bool], count: int) -> list[bool]:
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
            return [not turns for turns in rotated]


LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def hf_family(values: Mapping[str, Any], path: Path) -> Architecture:
    """Return the family that config.json names."""
    family = family_named(values, str(path))
    if family.rope.interleaved and not ConfigFields(values, str(path)).flag("rope_interleave", True):
        return replace(family, rope=replace(family.rope, interleaved=False))
    return family


def hf_config(values: Mapping[str, Any], names: frozenset[str], path: Path) -> ModelConfig:
    """Return the model's config; `names` are the stored tensors."""
    fields = ConfigFields(values, str(path))
    family = hf_family(values, path)
    num_layers = check_layers(names, LAYER, fields.count("num_hidden_layers"), fields.origin)
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
        norm=NormSpec(fields.number("rms_norm_eps")),
        rope=rope,
        tied_embeddings=fields.flag("tie_word_embeddings", "lm_head.weight" not in names),
        embedding_scale=_embedding_scale(fields, family),
        logit_scale=1 / (optional_number(fields, family.scales.logits_divisor) or 1.0),
        logit_softcap=optional_number(fields, family.scales.logits_cap),
    )


def _embedding_scale(fields: ConfigFields, family: Architecture) -> float:
    if family.scales.embedding_by_width:
        return math.sqrt(fields.count("hidden_size"))
    return optional_number(fields, family.scales.embedding) or 1.0
