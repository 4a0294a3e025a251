"""GGUF metadata as a ModelConfig."""

from typing import Any

import numpy as np

from foreword.errors import CheckpointError
from foreword.models.config import FrequencyFactors, LinearRopeScaling, ModelConfig, RopeScaling
from foreword.models.formats.fields import ConfigFields, check_config, windowed_context
from foreword.models.formats.gguf.file import GgufFile

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of general.architecture that the decoder computes; `llama` includes Mistral and SmolLM."""

ROPE_FACTORS = "rope_freqs.weight"


def gguf_config(file: GgufFile) -> ModelConfig:
    """The config that a GGUF file describes, partly by the tensors that it holds."""
    origin = str(file.path)
    architecture = ConfigFields(file.metadata, origin).text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{origin}: architecture {architecture!r} is not supported; use {', '.join(GGUF_ARCHITECTURES)}"
        )
    fields = ConfigFields(file.metadata, origin, prefix=f"{architecture}.")
    _refuse_variants(file, fields)
    heads = _per_layer_count(fields, "attention.head_count")
    hidden = fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", hidden // heads or None)
    window = fields.get("attention.sliding_window")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_embedding_rows(file),
        hidden_size=hidden,
        intermediate_size=_per_layer_count(fields, "feed_forward_length"),
        num_layers=fields.count("block_count"),
        num_heads=heads,
        num_kv_heads=_per_layer_count(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=windowed_context(
            fields.count("context_length"), fields.count("attention.sliding_window") if window else None
        ),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, fields, head_dim),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        tied_embeddings="output.weight" not in file.tensors,
    )
    return check_config(config, origin)


def _embedding_rows(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: it holds no token_embd.weight matrix; give a whole model file")
    return embedding.shape[0]


def _per_layer_count(fields: ConfigFields, key: str, default: int | None = None) -> int:
    """A count that some files repeat for every layer; all layers must agree."""
    value = fields.get(key)
    if not isinstance(value, list):
        return fields.count(key, default)
    if len(set(map(str, value))) != 1:
        raise fields.unsupported(f"a {key} that differs between layers")
    return ConfigFields({key: value[0]}, fields.origin).count(key)


def _refuse_variants(file: GgufFile, fields: ConfigFields) -> None:
    if _positive(file.metadata.get("split.count"), 1):
        raise CheckpointError(
            f"{file.path} is one part of a split model; join the parts with llama-gguf-split --merge"
        )
    if _positive(fields.get("expert_count"), 0):
        raise fields.unsupported("a mixture of experts")


def _positive(value: Any, above: int) -> bool:  # noqa: ANN401
    return isinstance(value, int) and value > above


def _rope_scaling(file: GgufFile, fields: ConfigFields, head_dim: int) -> RopeScaling | None:
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise fields.unsupported("rotating a part of each head (rope.dimension_count)")
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported("value heads of another size than key heads")
    kind, factor = _stated_scaling(fields)
    if kind not in ("none", "linear"):
        raise fields.unsupported(f"rope scaling {kind!r}")
    if ROPE_FACTORS not in file.tensors:
        return LinearRopeScaling(factor) if kind == "linear" else None
    if kind == "linear":
        raise fields.unsupported("linear rope scaling together with frequency factors")
    return _frequency_factors(file, fields, head_dim)


def _stated_scaling(fields: ConfigFields) -> tuple[str, float]:
    """Kind and factor. A factor without a kind is linear, as in llama.cpp; old files name it `rope.scale_linear`."""
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
