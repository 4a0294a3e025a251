"""Converts GGUF metadata to a ModelConfig."""

from typing import Any

import numpy as np

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import Architecture, GgufNames
from foreword.models.architectures.registry import GGUF_NAMES, gguf_family_named
from foreword.models.config import (
    AttentionSpec,
    FrequencyFactors,
    LayerSpec,
    LinearRopeScaling,
    MlpSpec,
    ModelConfig,
    NormSpec,
    RopeScaling,
    RopeSpec,
    Scores,
)
from foreword.models.formats.fields import ConfigFields, check_heads, check_layers
from foreword.models.formats.gguf.file import GgufFile
from foreword.models.formats.gguf.settings import GATING, hf_settings, module_layers, rope_settings
from foreword.models.formats.hf.config import LAYER, hf_config
from foreword.models.formats.hf.rope import extended_context, rope_spec

ROPE_FACTORS = "rope_freqs.weight"


def gguf_family(file: GgufFile) -> tuple[Architecture, GgufNames]:
    """Return a GGUF file's family and its GGUF names."""
    name = ConfigFields(file.metadata, str(file.path)).text("general.architecture")
    families = (gguf_family_named(name, scores) for scores in _scores(file, name))
    family = next((family for family in families if family is not None), None)
    if family is None:
        raise CheckpointError(
            f"{file.path}: architecture {name[:60]!r} is not supported, or not with such experts; "
            f"use {', '.join(GGUF_NAMES)}"
        )
    assert family.gguf is not None
    return family, family.gguf


def _scores(file: GgufFile, name: str) -> tuple[Scores | None, ...]:
    """Return the router's score functions that the file allows; None without experts."""
    if not _positive(file.metadata.get(f"{name}.expert_count"), 0):
        return (None,)
    stated = file.metadata.get(f"{name}.expert_gating_func")
    if not isinstance(stated, int):
        return tuple(Scores)
    return (GATING[stated],) if stated in GATING else ()


def gguf_config(file: GgufFile, tensors: frozenset[str]) -> ModelConfig:
    """Return the config of a GGUF file, using metadata and the canonical tensor names."""
    family, names = gguf_family(file)
    fields = ConfigFields(file.metadata, str(file.path), prefix=f"{names.architecture}.")
    _refuse_variants(file)
    if names.settings is not None:
        if ROPE_FACTORS in file.tensors:
            raise fields.unsupported(f"{ROPE_FACTORS} in this family")
        settings = hf_settings(file, family, names, _embedding_rows(file))
        return hf_config(settings, tensors, file.path)
    attention = _attention(file, fields, family)
    mlp = MlpSpec(_per_layer_count(fields, "feed_forward_length"), bias="blk.0.ffn_gate.bias" in file.tensors)
    num_layers = check_layers(tensors, LAYER, module_layers(fields).start, fields.origin)
    rope = _rope(file, fields, attention.head_dim)
    return ModelConfig(
        architecture=family.name,
        vocab_size=_embedding_rows(file),
        hidden_size=fields.count("embedding_length"),
        context_length=extended_context(fields.count("context_length"), rope),
        layers=(LayerSpec(attention, mlp),) * num_layers,
        norm=NormSpec(fields.number("attention.layer_norm_rms_epsilon")),
        rope=rope,
        tied_embeddings="output.weight" not in file.tensors,
    )


def _attention(file: GgufFile, fields: ConfigFields, family: Architecture) -> AttentionSpec:
    heads = _per_layer_count(fields, "attention.head_count")
    window = fields.get("attention.sliding_window")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=_per_layer_count(fields, "attention.head_count_kv", heads),
        head_dim=fields.count("attention.key_length", fields.count("embedding_length") // heads or None),
        bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        window=fields.count("attention.sliding_window") if window else None,
    )
    return check_heads(attention, fields.origin)


def _embedding_rows(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: it holds no token_embd.weight matrix; give a whole model file")
    return embedding.shape[0]


def _per_layer_count(fields: ConfigFields, key: str, default: int | None = None) -> int:
    """Return a count that some files repeat per layer; all layers must agree."""
    value = fields.get(key)
    if not isinstance(value, list):
        return fields.count(key, default)
    if len(set(map(str, value))) != 1:
        raise fields.unsupported(f"a {key} that differs between layers")
    return ConfigFields({key: value[0]}, fields.origin).count(key)


def _refuse_variants(file: GgufFile) -> None:
    if _positive(file.metadata.get("split.count"), 1):
        raise CheckpointError(
            f"{file.path} is one part of a split model; join the parts with llama-gguf-split --merge"
        )


def _positive(value: Any, above: int) -> bool:  # noqa: ANN401
    return isinstance(value, int) and value > above


def _rope(file: GgufFile, fields: ConfigFields, head_dim: int) -> RopeSpec:
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise fields.unsupported("rotating a part of each head (rope.dimension_count)")
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported("value heads of another size than key heads")
    kind, factor = _stated_scaling(fields)
    if kind == "yarn" and ROPE_FACTORS not in file.tensors:
        return rope_spec(ConfigFields(rope_settings(file, fields), fields.origin), head_dim=head_dim)
    return RopeSpec(
        fields.number("rope.freq_base", 10000.0), _rope_scaling(file, fields, head_dim, kind, factor)
    )


def _rope_scaling(
    file: GgufFile, fields: ConfigFields, head_dim: int, kind: str, factor: float
) -> RopeScaling | None:
    if kind not in ("none", "linear"):
        raise fields.unsupported(f"rope scaling {kind!r}")
    if ROPE_FACTORS not in file.tensors:
        return LinearRopeScaling(factor) if kind == "linear" else None
    if kind == "linear":
        raise fields.unsupported("linear rope scaling together with frequency factors")
    return _frequency_factors(file, fields, head_dim)


def _stated_scaling(fields: ConfigFields) -> tuple[str, float]:
    """Return scaling kind and factor.

    A factor alone is linear, as in llama.cpp; old files call it `rope.scale_linear`.
    """
    key = "rope.scaling.factor" if fields.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = fields.number(key, 1.0)
    return fields.text("rope.scaling.type", "none" if factor == 1.0 else "linear"), factor


def _frequency_factors(file: GgufFile, fields: ConfigFields, head_dim: int) -> FrequencyFactors:
    stored = file.tensors[ROPE_FACTORS]
    if stored.kind != "F32" or stored.shape != (head_dim // 2,):
        raise fields.unsupported(f"{ROPE_FACTORS} of type {stored.kind} and shape {stored.shape}")
    factors = file.rows(ROPE_FACTORS).reshape(-1).view(np.float32)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} holds no usable numbers; get the file again")
    return FrequencyFactors(tuple(factors.tolist()))
