"""What the layers of a config.json look like, one by one where they differ."""

from dataclasses import replace

from foreword.models.architectures.architecture import Architecture, Window, WindowedLayers
from foreword.models.architectures.switch import Switch
from foreword.models.config import AttentionSpec, LatentSpec, LayerSpec, MlpSpec
from foreword.models.formats.fields import ConfigFields, check_heads
from foreword.models.formats.hf.experts import dense_layers, experts_spec, shared_size
from foreword.models.formats.hf.rope import local_rope_spec, score_factor

_KINDS = ("full_attention", "sliding_attention")


def has(fields: ConfigFields, switch: Switch) -> bool:
    """Whether the model has what its family may have."""
    return switch.always or (switch.key is not None and fields.flag(switch.key, switch.default))


def layer_specs(fields: ConfigFields, family: Architecture, count: int) -> tuple[LayerSpec, ...]:
    """Every layer."""
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


def layer_behind(fields: ConfigFields, family: Architecture) -> LayerSpec:
    """What one more layer behind the last looks like: a module that guesses ahead."""
    mlp = _experts_mlp(fields, family) or _mlp(fields, family)
    return LayerSpec(attention_spec(fields, family), mlp, family.norms)


def attention_spec(fields: ConfigFields, family: Architecture) -> AttentionSpec:
    """What the attention of all layers has in common."""
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
    """That of layers with experts; its own width is that of the shared ones."""
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
    """Which layers turn queries and keys by position."""
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
    """How long it is; None where it is as long as the context."""
    if fields.get("sliding_window") is None:
        return None
    width = fields.count("sliding_window")
    return width if width < fields.count("max_position_embeddings") else None


def _windowed_layers(
    fields: ConfigFields, rule: Window | None, rotated: list[bool], count: int
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


def _windowed(fields: ConfigFields, rule: Window, rotated: list[bool], count: int) -> list[bool]:
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
