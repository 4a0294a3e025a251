"""GGUF metadata by the keys of config.json, so that one reader knows the families."""

from typing import Any

import numpy as np

from foreword.models.architectures.architecture import Architecture, GgufNames
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.gguf.file import GgufFile

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (LONG_FACTORS, SHORT_FACTORS)
"""Tensors that are no weights."""

_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
_BIASES = {
    "attention_bias": "blk.0.attn_q.bias",
    "qkv_bias": "blk.0.attn_q.bias",
    "mlp_bias": "blk.0.ffn_gate.bias",
}


def hf_settings(file: GgufFile, family: Architecture, names: GgufNames, vocab_size: int) -> dict[str, Any]:
    """What a config.json of the same model says."""
    fields = ConfigFields(file.metadata, str(file.path), prefix=f"{names.architecture}.")
    values = {key: _value(fields.get(stored)) for key, stored in _KEYS.items()}
    values |= {key: tensor in file.tensors for key, tensor in _BIASES.items()}
    values |= names.settings or {}
    values["architectures"] = [family.hf_class]
    values["vocab_size"] = vocab_size
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["sliding_window"] = values["sliding_window"] or None
    if family.scales.attention_root is not None:
        values[family.scales.attention_root] = _score_root(fields, names)
    if fields.get("rope.dimension_count") is not None:
        width = fields.count("embedding_length") // fields.count("attention.head_count")
        head_dim = fields.count("attention.key_length", width or None)
        values["partial_rotary_factor"] = fields.count("rope.dimension_count") / head_dim
    values["rope_scaling"] = _rope_scaling(file, fields)
    return values


def _value(stored: Any) -> Any:  # noqa: ANN401
    """A number that some files repeat for every layer, once."""
    return stored[0] if isinstance(stored, list) and len(set(map(str, stored))) == 1 else stored


def _score_root(fields: ConfigFields, names: GgufNames) -> int:
    """llama.cpp goes by the number of layers, too: the files do not say."""
    if fields.count("block_count") == names.deep:
        return fields.count("embedding_length") // fields.count("attention.head_count")
    return fields.count("attention.key_length")


def _rope_scaling(file: GgufFile, fields: ConfigFields) -> dict[str, Any] | None:
    if LONG_FACTORS in file.tensors and SHORT_FACTORS in file.tensors:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(file, LONG_FACTORS, fields),
            "short_factor": _factors(file, SHORT_FACTORS, fields),
            "attention_factor": fields.get("rope.scaling.attn_factor"),
        }
    kind, factor = fields.text("rope.scaling.type", "none"), fields.get("rope.scaling.factor")
    return None if kind == "none" else {"rope_type": kind, "factor": factor}


def _factors(file: GgufFile, name: str, fields: ConfigFields) -> list[float]:
    if file.tensors[name].kind != "F32":
        raise fields.unsupported(f"{name} of type {file.tensors[name].kind}")
    factors: list[float] = file.rows(name).reshape(-1).view(np.float32).tolist()
    return factors
