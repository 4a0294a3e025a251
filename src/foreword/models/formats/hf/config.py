"""config.json of a Hugging Face model as a ModelConfig."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import Architecture, Switch, Window
from foreword.models.architectures.registry import BY_HF_CLASS
from foreword.models.config import (
    AttentionSpec,
    LayerSpec,
    LinearRopeScaling,
    Llama3RopeScaling,
    MlpSpec,
    ModelConfig,
    NormSpec,
    RopeScaling,
    RopeSpec,
)
from foreword.models.formats.fields import ConfigFields, check_heads, check_layers, windowed_context

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def hf_config(values: Mapping[str, Any], names: frozenset[str], path: Path) -> ModelConfig:
    """The config that config.json describes; `names` are the tensors that the files hold."""
    fields = ConfigFields(values, str(path))
    family = _family(fields)
    _refuse_variants(fields)
    window = _window(fields, family)
    layer = LayerSpec(
        _attention(fields, family, window),
        MlpSpec(
            intermediate_size=fields.count("intermediate_size"),
            bias=_has(fields, family.mlp_bias),
            activation=fields.text("hidden_act", "silu"),
        ),
    )
    num_layers = check_layers(names, _LAYER, fields.count("num_hidden_layers"), fields.origin)
    return ModelConfig(
        architecture=family.name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        context_length=windowed_context(fields.count("max_position_embeddings"), window),
        layers=(layer,) * num_layers,
        norm=NormSpec(fields.number("rms_norm_eps")),
        rope=rope_spec(fields),
        tied_embeddings=fields.flag("tie_word_embeddings", "lm_head.weight" not in names),
    )


def _family(fields: ConfigFields) -> Architecture:
    named = fields.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if not isinstance(name, str) or name not in BY_HF_CLASS:
        raise CheckpointError(
            f"{fields.origin}: architecture {named!r} is not supported; use {', '.join(BY_HF_CLASS)}"
        )
    return BY_HF_CLASS[name]


def _refuse_variants(fields: ConfigFields) -> None:
    if fields.get("quantization_config") is not None:
        raise CheckpointError(
            f"{fields.origin}: weights quantised in Hugging Face's formats are not supported; "
            "use the unquantised model or a GGUF file"
        )


def _attention(fields: ConfigFields, family: Architecture, window: int | None) -> AttentionSpec:
    heads = fields.count("num_attention_heads")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads if family.kv_heads_may_be_missing else None),
        head_dim=fields.count("head_dim", fields.count("hidden_size") // heads or None),
        bias=_has(fields, family.attention_bias),
        output_bias=_has(fields, family.output_bias),
        qk_norm=family.qk_norm,
        window=window,
    )
    return check_heads(attention, fields.origin)


def _has(fields: ConfigFields, switch: Switch) -> bool:
    return switch.always or (switch.key is not None and fields.flag(switch.key, False))


def _window(fields: ConfigFields, family: Architecture) -> int | None:
    if family.window is Window.SOME_LAYERS and fields.flag("use_sliding_window", False):
        raise fields.unsupported("a sliding window in some layers (use_sliding_window)")
    if family.window is not Window.ALL_LAYERS or fields.get("sliding_window") is None:
        return None
    return fields.count("sliding_window")


def rope_spec(fields: ConfigFields) -> RopeSpec:
    """The rotary embedding that a config describes."""
    rope = _rope_fields(fields)
    return RopeSpec(rope.number("rope_theta", 10000.0), _rope_scaling(rope))


def _rope_fields(fields: ConfigFields) -> ConfigFields:
    """Rotary settings, found as transformers finds them.

    They are in `rope_parameters` (transformers 5) or in `rope_scaling` (before it). With both, the older section
    counts and the newer one is not looked at; what a section leaves open stands beside it.
    """
    merged: dict[str, Any] = {key: fields.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    merged["original_max_position_embeddings"] = fields.get("max_position_embeddings")
    sections = {key: fields.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, section in sections.items():
        if section is not None and not isinstance(section, Mapping):
            raise fields.malformed(key, "an object")
    merged |= sections["rope_scaling"] or sections["rope_parameters"] or {}
    if (trained := fields.get("original_max_position_embeddings")) is not None:
        merged["original_max_position_embeddings"] = trained
    return ConfigFields(merged, fields.origin)


def _rope_scaling(rope: ConfigFields) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.unsupported("rotating a part of each head (partial_rotary_factor)")
    if any(isinstance(value, Mapping) for value in rope.values.values()):
        raise rope.unsupported("rope settings that differ between layers")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(rope.number("factor"))
    if kind == "llama3":
        return Llama3RopeScaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=rope.count("original_max_position_embeddings"),
        )
    raise rope.unsupported(f"rope scaling {kind!r}")
