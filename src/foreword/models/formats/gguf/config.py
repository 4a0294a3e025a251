"""Converts GGUF metadata to the keys of a config.json, so that one reader describes all families."""

from dataclasses import replace
from typing import Any

import numpy as np

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import (
    Architecture,
    ConfigSwitch,
    GgufNames,
    Grouping,
    RecurrentKeys,
    WindowedLayers,
    WindowField,
)
from foreword.models.architectures.registry import GGUF_NAMES, gguf_family_named
from foreword.models.config import ModelConfig, Norms, Scores
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.gguf.file import GgufFile
from foreword.models.formats.hf.config import model_config

FREQUENCY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS)  # tensors that contain settings, not weights
GATING = {1: Scores.SOFTMAX, 2: Scores.SIGMOID}  # values of the metadata key `expert_gating_func`

_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
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
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "full_attention_interval": "full_attention_interval",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
"""Keys of config.json -> keys of the metadata, after the architecture's name."""

_SWITCHES = {
    "attention_bias": "attn_q.bias",
    "output_bias": "attn_output.bias",
    "mlp_bias": "ffn_up.bias",
    "qk_norm": "attn_q_norm.weight",
}
"""Features of a family -> the tensor that exists only with this feature; the metadata does not state features."""


def gguf_family(file: GgufFile) -> tuple[Architecture, GgufNames]:
    """Return the family of a GGUF file, with the family's GGUF names."""
    name = ConfigFields(file.metadata, str(file.path)).text("general.architecture")
    families = (gguf_family_named(name, scores, file.metadata) for scores in _scores(file, name))
    family = next((family for family in families if family is not None), None)
    if family is None:
        raise CheckpointError(
            f"{file.path}: architecture {name[:60]!r} is not supported, or not with this expert_gating_func; "
            f"use {', '.join(GGUF_NAMES)}"
        )
    assert family.gguf is not None
    return family, family.gguf


def _scores(file: GgufFile, name: str) -> tuple[Scores | None, ...]:
    """Return the score functions that the metadata allows for the router; (None,) without experts."""
    if not _exceeds(file.metadata.get(f"{name}.expert_count"), 0):
        return (None,)
    stated = file.metadata.get(f"{name}.expert_gating_func")
    if not isinstance(stated, int):
        return tuple(Scores)
    return (GATING[stated],) if stated in GATING else ()


def gguf_config(file: GgufFile, tensors: frozenset[str]) -> ModelConfig:
    """Return the config of a GGUF file, using metadata and the canonical tensor names."""
    if _exceeds(file.metadata.get("split.count"), 1):
        raise CheckpointError(
            f"{file.path} is one part of a split model; join the parts with llama-gguf-split --merge"
        )
    family, names = gguf_family(file)
    fields = ConfigFields(file.metadata, str(file.path), prefix=f"{names.architecture}.")
    values = _settings(file, fields, family, names)
    for feature, suffix in _SWITCHES.items():
        values[feature] = any(name.endswith(f".{suffix}") for name in file.tensors)
    switches: dict[str, Any] = {feature: ConfigSwitch(key=feature) for feature in _SWITCHES}
    if names.windows_everywhere and values["sliding_window"] is not None:
        switches["window"] = WindowField(WindowedLayers.ALL, listed=False)
    stated = _KEYS | ({} if family.recurrent is None else _recurrent_keys(family.recurrent))
    named = {key: fields.prefix + stored for key, stored in stated.items()}
    config = model_config(
        ConfigFields(values, fields.origin, named=named), replace(family, **switches), tensors
    )
    if names.interleaved and not names.interleaved_whole and config.rope.rotary_dim is not None:
        raise fields.unsupported("rotating a part of each head (rope.dimension_count)")
    return config


def _settings(file: GgufFile, fields: ConfigFields, family: Architecture, names: GgufNames) -> dict[str, Any]:
    """Return the metadata as values of a config.json."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: it holds no token_embd.weight matrix; give a whole model file")
    values = {key: _common_value(fields.get(stored)) for key, stored in _KEYS.items()}
    values |= {key: value for key, value in names.settings.items() if values.get(key) is None}
    values["rope_scaling"] = _rope_scaling(file, fields)
    values["num_hidden_layers"] = layers = module_layers(fields).start
    if layers > len(file.tensors):  # checked before lists of this length are made
        raise CheckpointError(f"{file.path}: its {layers} layers have no tensors; get the file again")
    values["vocab_size"] = embedding.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["sliding_window"] = values["sliding_window"] or None
    if family.rope.by_type and values.get("position_embedding_type") is None:
        # llama.cpp writes Granite's position_embedding_type as rope.scaling.finetuned.
        values["position_embedding_type"] = "rope" if fields.flag("rope.scaling.finetuned", True) else "nope"
    if family.recurrent is not None:
        values |= _recurrent_values(file, fields, family, layers)
    if values.get(family.mlp_size) is None:  # in Granite 4 without experts
        values[family.mlp_size] = values["intermediate_size"]
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if family.scales.attention_root is not None:
        values[family.scales.attention_root] = _score_root(fields, names)
    if family.experts is not None and family.experts.grouping is Grouping.BY_METHOD and values["n_group"]:
        values["topk_method"] = "group_limited_greedy"
    return values | _head_sizes(fields, family, values)


def _head_sizes(fields: ConfigFields, family: Architecture, values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a config.json that follow from the sizes of heads."""
    if family.is_latent:
        # Newer files have the sizes of heads under keys with "_mla"; key_length is then the size of a latent row.
        key, value = "attention.key_length_mla", "attention.value_length_mla"
        if fields.get(key) is None:
            key, value = "attention.key_length", "attention.value_length"
        return {
            "qk_nope_head_dim": fields.count(key) - fields.count("rope.dimension_count"),
            "v_head_dim": fields.count(value),
        }
    heads = _common_value(fields.get("attention.head_count"))
    if not _exceeds(heads, 0):  # `model_config` raises the error
        return {}
    head_dim = fields.count("attention.key_length", fields.count("embedding_length") // heads or None)
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported("value heads of another size than key heads")
    is_rotated = not family.rope.by_type or values["position_embedding_type"] == "rope"
    if fields.get("rope.dimension_count") is None or not is_rotated:
        return {}
    return {"partial_rotary_factor": fields.count("rope.dimension_count") / head_dim}


def module_layers(fields: ConfigFields) -> range:
    """Return the indices of layers that are MTP modules: in GGUF they follow the decoder's layers."""
    modules, count = fields.whole("nextn_predict_layers", 0), fields.count("block_count")
    if modules >= count:
        raise fields.malformed("nextn_predict_layers", f"fewer than all {count} layers")
    return range(count - modules, count)


def _common_value(stored: Any) -> Any:  # noqa: ANN401
    """Return a setting, reduced to one value if the file repeats that value for each layer."""
    return stored[0] if isinstance(stored, list) and len(set(map(str, stored))) == 1 else stored


def _exceeds(value: object, limit: int) -> bool:
    return isinstance(value, int) and value > limit


def _score_root(fields: ConfigFields, names: GgufNames) -> int:
    """Return v, where 1 / sqrt(v) is the factor of attention scores. The number of layers decides, as in llama.cpp."""
    if fields.count("block_count") == names.deep:
        return fields.count("embedding_length") // fields.count("attention.head_count")
    return fields.count("attention.key_length")


def _rope_scaling(file: GgufFile, fields: ConfigFields) -> dict[str, Any] | None:
    """Return the section `rope_scaling` of a config.json. A factor without a type means linear, as in llama.cpp."""
    factor = fields.optional_number("rope.scaling.factor") or fields.optional_number("rope.scale_linear")
    kind = fields.text("rope.scaling.type", "none" if factor in (None, 1.0) else "linear")
    if LONG_FACTORS in file.tensors and SHORT_FACTORS in file.tensors:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(file, LONG_FACTORS, fields),
            "short_factor": _factors(file, SHORT_FACTORS, fields),
            "attention_factor": fields.get("rope.scaling.attn_factor"),
        }
    if kind not in ("none", "linear", "yarn"):
        raise fields.unsupported(f"rope scaling {kind!r}")
    if FREQUENCY_FACTORS in file.tensors:  # GGUF files store llama3 scaling as a divisor for each frequency
        if kind != "none":
            raise fields.unsupported(f"{kind} rope scaling together with frequency factors")
        factors = _factors(file, FREQUENCY_FACTORS, fields)
        return {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "attention_factor": 1.0,
        }
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor or 1.0}
    return {"rope_type": kind, "factor": factor} | _yarn(fields)


def _yarn(fields: ConfigFields) -> dict[str, Any]:
    """Return the further settings of YaRN in `rope_scaling`."""
    values = {key: fields.get(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    if fields.get("rope.scaling.yarn_log_multiplier") is None:
        return values
    if fields.get("attention.kv_lora_rank") is None:
        raise fields.unsupported("rope.scaling.yarn_log_multiplier in this family")
    # GGUF stores a tenth of mscale_all_dim, and no factor of the rotated dimensions.
    mscale_all_dim = 10 * fields.number("rope.scaling.yarn_log_multiplier")
    return values | {"mscale_all_dim": mscale_all_dim, "attention_factor": 1.0}


def _factors(file: GgufFile, name: str, fields: ConfigFields) -> list[float]:
    if file.tensors[name].kind != "F32":
        raise fields.unsupported(f"{name} of type {file.tensors[name].kind}")
    factors: list[float] = file.rows(name).reshape(-1).view(np.float32).tolist()
    return factors


_KV_HEADS, _MLP_SIZE = "attention.head_count_kv", "feed_forward_length"
_RECURRENT = "attention.recurrent_layers"


def _recurrent_keys(keys: RecurrentKeys) -> dict[str, str]:
    """Return keys of config.json -> keys of the metadata (without the architecture's name), for a family."""
    if keys.heads is None:
        return {}
    stated = {
        keys.kernel: "ssm.conv_kernel",
        keys.heads: "ssm.time_step_rank",
        keys.key_heads: "ssm.group_count",
        keys.key_dim: "ssm.state_size",
        keys.value_dim: "ssm.inner_size",
    }
    return {key: name for key, name in stated.items() if key is not None}


def _recurrent_values(
    file: GgufFile, fields: ConfigFields, family: Architecture, count: int
) -> dict[str, Any]:
    """Return values of a config.json: the sizes of recurrent layers, and the kind of each of the `count` layers."""
    assert family.recurrent is not None
    keys = family.recurrent
    values = {key: fields.get(name) for key, name in _recurrent_keys(keys).items()}
    if keys.heads is not None and keys.value_dim is not None:
        heads, width = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
        if width % heads:
            raise fields.malformed("ssm.inner_size", f"a multiple of {heads} heads")
        values[keys.value_dim] = width // heads
    if keys.heads is not None and keys.conv_bias is not None:
        values[keys.conv_bias] = any(name.endswith(".ssm_conv1d.bias") for name in file.tensors)
    return values | _layers(file, fields, family, count)


def _layers(file: GgufFile, fields: ConfigFields, family: Architecture, count: int) -> dict[str, Any]:
    """Return `layer_types`, and the sizes that the metadata states for each layer (0: the layer lacks the sublayer)."""
    assert family.recurrent is not None
    kv_heads = _per_layer(fields, _KV_HEADS, count)
    is_listed = isinstance(fields.get(_KV_HEADS), list)
    values: dict[str, Any] = {}
    if is_listed:
        values["num_key_value_heads"] = _one_size(fields, _KV_HEADS, kv_heads)
    if family.norms is Norms.SINGLE:  # a layer has only one of attention, MLP and recurrence
        widths = _per_layer(fields, _MLP_SIZE, count)
        kinds = [
            _kind_of_single(file, index, heads, width)
            for index, (heads, width) in enumerate(zip(kv_heads, widths, strict=True))
        ]
        return values | {"layer_types": kinds, "intermediate_size": _one_size(fields, _MLP_SIZE, widths)}
    if fields.get(_RECURRENT) is not None:
        has_attention = [not recurrent for recurrent in _per_layer(fields, _RECURRENT, count)]
    elif is_listed and (family.recurrent.attention_layers is not None or 0 in kv_heads):
        has_attention = [heads > 0 for heads in kv_heads]
    else:
        return values
    return values | {
        "layer_types": ["full_attention" if attends else "linear_attention" for attends in has_attention]
    }


def _kind_of_single(file: GgufFile, index: int, heads: int, width: int) -> str:
    """Return the kind of a layer with one sublayer, which has `heads` KV heads and an MLP of this width."""
    if width:
        return "moe" if f"blk.{index}.ffn_gate_inp.weight" in file.tensors else "mlp"
    return "full_attention" if heads else "linear_attention"


def _per_layer(fields: ConfigFields, key: str, count: int) -> list[int]:
    """Return a setting of each of the decoder's `count` layers; a stored list may also have values of MTP modules."""
    stored = fields.get(key)
    if not isinstance(stored, list):
        return [fields.whole(key, 0)] * count
    if len(stored) < count or not all(isinstance(value, int) and value >= 0 for value in stored):
        raise fields.malformed(key, f"a list of {count} whole numbers")
    return stored[:count]


def _one_size(fields: ConfigFields, key: str, sizes: list[int]) -> int:
    """Return the only size other than 0 that layers have; 0: there is none. Raise if there are several."""
    distinct = sorted(set(sizes) - {0})
    if len(distinct) > 1:
        raise fields.unsupported(f"{key} of {distinct[0]} in some layers and {distinct[-1]} in others")
    return distinct[0] if distinct else 0
