"""Converts GGUF metadata to config.json keys, so that one reader handles all families."""

from typing import Any

import numpy as np

from foreword.models.architectures.architecture import Architecture, GgufNames, Grouping
from foreword.models.config import Scores
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.gguf.file import GgufFile

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (LONG_FACTORS, SHORT_FACTORS)
"""Tensors that are not weights."""

GATING = {1: Scores.SOFTMAX, 2: Scores.SIGMOID}
"""Values of `expert_gating_func`."""

_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
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
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
_ROPE_KEYS = {
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
_BIASES = {
    "attention_bias": "blk.0.attn_q.bias",
    "qkv_bias": "blk.0.attn_q.bias",
    "mlp_bias": "blk.0.ffn_gate.bias",
}


def hf_settings(file: GgufFile, family: Architecture, names: GgufNames, vocab_size: int) -> dict[str, Any]:
    """Return the equivalent of a config.json."""
    fields = ConfigFields(file.metadata, str(file.path), prefix=f"{names.architecture}.")
    values = {key: _value(fields.get(stored)) for key, stored in _KEYS.items()}
    values |= {key: tensor in file.tensors for key, tensor in _BIASES.items()}
    values |= {key: value for key, value in (names.settings or {}).items() if values.get(key) is None}
    values |= rope_settings(file, fields)
    values["architectures"] = [family.hf_class]
    values["num_hidden_layers"] = module_layers(fields).start
    values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    values["vocab_size"] = vocab_size
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["sliding_window"] = values["sliding_window"] or None
    kv_heads = values["num_key_value_heads"]
    if family.recurrent is not None and isinstance(kv_heads, list):  # recurrent layers have none
        values["layer_types"] = ["full_attention" if heads else "linear_attention" for heads in kv_heads]
        values["num_key_value_heads"] = max(kv_heads)
    if family.scales.attention_root is not None:
        values[family.scales.attention_root] = _score_root(fields, names)
    if family.experts is not None and family.experts.grouping is Grouping.BY_METHOD and values["n_group"]:
        values["topk_method"] = "group_limited_greedy"
    if family.is_latent:
        values |= _latent_settings(fields)
    elif fields.get("rope.dimension_count") is not None:
        width = fields.count("embedding_length") // fields.count("attention.head_count")
        head_dim = fields.count("attention.key_length", width or None)
        values["partial_rotary_factor"] = fields.count("rope.dimension_count") / head_dim
    return values


def module_layers(fields: ConfigFields) -> range:
    """Return the layers that are MTP modules: GGUF appends them to the decoder's."""
    modules, count = fields.whole("nextn_predict_layers", 0), fields.count("block_count")
    if modules >= count:
        raise fields.malformed("nextn_predict_layers", f"fewer than the {count} layers of all")
    return range(count - modules, count)


def rope_settings(file: GgufFile, fields: ConfigFields) -> dict[str, Any]:
    """Return the rotary settings of a config.json."""
    values = {key: fields.get(stored) for key, stored in _ROPE_KEYS.items()}
    return values | {"rope_scaling": _rope_scaling(file, fields)}


def _latent_settings(fields: ConfigFields) -> dict[str, Any]:
    """Return head sizes. Newer files also store those of the latent rows, as if they were one head."""
    key, value = "attention.key_length_mla", "attention.value_length_mla"
    if fields.get(key) is None:
        key, value = "attention.key_length", "attention.value_length"
    return {
        "qk_nope_head_dim": fields.count(key) - fields.count("rope.dimension_count"),
        "v_head_dim": fields.count(value),
    }


def _value(stored: Any) -> Any:  # noqa: ANN401
    """Return a number that some files repeat per layer."""
    return stored[0] if isinstance(stored, list) and len(set(map(str, stored))) == 1 else stored


def _score_root(fields: ConfigFields, names: GgufNames) -> int:
    """Return the score scale by the number of layers, as llama.cpp does; files do not state it."""
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
    if kind == "yarn":
        return {"rope_type": kind, "factor": factor} | _yarn(fields)
    return None if kind == "none" else {"rope_type": kind, "factor": factor}


def _yarn(fields: ConfigFields) -> dict[str, Any]:
    values = {key: fields.get(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    if fields.get("rope.scaling.yarn_log_multiplier") is None:
        return values
    if fields.get("attention.kv_lora_rank") is None:
        raise fields.unsupported("rope.scaling.yarn_log_multiplier in this family")
    # Stored as a tenth of the score scale; the magnitude of rotated dimensions is not stored.
    everywhere = 10 * fields.number("rope.scaling.yarn_log_multiplier")
    return values | {"mscale_all_dim": everywhere, "attention_factor": 1.0}


def _factors(file: GgufFile, name: str, fields: ConfigFields) -> list[float]:
    if file.tensors[name].kind != "F32":
        raise fields.unsupported(f"{name} of type {file.tensors[name].kind}")
    factors: list[float] = file.rows(name).reshape(-1).view(np.float32).tolist()
    return factors
