"""Writes tiny checkpoints of the newer families as GGUF, as llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from helpers.tiny_gguf import _write_tokenizer as write_tokenizer

ARCHITECTURES = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "lfm2": gguf.MODEL_ARCH.LFM2,
}
MODULES = 1
"""Layers that guess ahead, which llama.cpp keeps behind GLM's own."""

_PERMUTED = ("granite", "smollm3", "mixtral")
_NUMBERS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "routed_scaling_factor": "expert_weights_scale",
}
_COUNTS = {
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}


def write_family_gguf(
    family: str, directory: Path, path: Path, *, split: bool = True, experts: str | None = None
) -> Path:
    """The model of a directory that `make_family` made; latent attention in two parts, or whole as in old files.

    `experts` is how the matrices of experts are stored; None: in floats.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_hyperparameters(writer, config, MODULES if family == "glm4_moe" else 0)
    if "kv_lora_rank" in config:
        _write_latent(writer, config, split)
    if family in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        gating = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(gating.SOFTMAX if family == "deepseek_v2" else gating.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    write_tokenizer(writer, directory, config["vocab_size"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"] + 1)
    for name, values in _tensors(family, directory, config, split).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        floats = np.ascontiguousarray(values, dtype=np.float32)
        if experts is not None and stored.endswith("_exps.weight"):
            kind = gguf.GGMLQuantizationType[experts]
            writer.add_tensor(stored, gguf.quants.quantize(floats, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, floats)
    _write_rope(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _write_latent(writer: gguf.GGUFWriter, config: dict[str, Any], split: bool) -> None:
    """Sizes of heads; of the split form also those of what is kept, as one head."""
    key, value = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    rank = config["kv_lora_rank"]
    if split:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
        key, value = rank + config["qk_rope_head_dim"], rank
    writer.add_key_length(key)
    writer.add_value_length(value)


def _write_hyperparameters(writer: gguf.GGUFWriter, config: dict[str, Any], modules: int) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + modules)
    if modules:
        writer.add_nextn_predict_layers(modules)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    kv_heads = 1 if "kv_lora_rank" in config else config["num_key_value_heads"]
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        kv_heads = [0 if kind == "conv" else kv_heads for kind in config["layer_types"]]
    writer.add_head_count_kv(kv_heads)
    if "kv_lora_rank" not in config:
        writer.add_key_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["norm_eps" if "norm_eps" in config else "rms_norm_eps"])
    for key, stored in _NUMBERS.items():
        if config.get(key) is not None:
            writer.add_float32(f"{writer.arch}.{stored}", float(config[key]))
    for key, stored in _COUNTS.items():
        if config.get(key) and f"{writer.arch}.{stored}" not in writer.kv_data[0]:
            writer.add_uint32(f"{writer.arch}.{stored}", int(config[key]))


def _write_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    turned = config.get("qk_rope_head_dim") or _head_dim(config) * rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(turned))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        for kind in ("long", "short"):
            writer.add_tensor(
                f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32)
            )


def _split_latent(name: str, values: np.ndarray, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """What expands latent rows: to keys, transposed, and to values."""
    heads = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
    nope = config["qk_nope_head_dim"]
    return {
        name.replace("kv_b_proj", "k_b_proj"): heads[:, :nope].swapaxes(1, 2),
        name.replace("kv_b_proj", "v_b_proj"): heads[:, nope:],
    }


def _experts_of_gpt_oss(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """All experts of a layer: rows of gate and up, which take turns, apart; matrices are stored transposed."""
    stem, _, part = name.rpartition(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    part = part.removesuffix("_bias")
    rows = values if kind == "bias" else values.swapaxes(1, 2)
    if part == "down_proj":
        return {f"{stem}.{part}.{kind}": rows}
    return {f"{stem}.gate_proj.{kind}": rows[:, 0::2], f"{stem}.up_proj.{kind}": rows[:, 1::2]}


def _module(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Some tensors of a layer that guesses ahead."""
    prefix, hidden = f"model.layers.{config['num_hidden_layers']}.", config["hidden_size"]
    return {
        prefix + "eh_proj.weight": np.ones((hidden, 2 * hidden)),
        prefix + "shared_head.norm.weight": np.ones(hidden),
        prefix + "self_attn.q_proj.weight": np.ones((hidden, hidden)),
    }


def _tensors(family: str, directory: Path, config: dict[str, Any], split: bool) -> dict[str, np.ndarray]:
    weights: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    stacked: dict[str, dict[int, np.ndarray]] = {}
    found = _module(config) if family == "glm4_moe" else {}
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        if name.endswith("conv.conv.weight"):
            values = values.squeeze(1)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if family in _PERMUTED and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if name.endswith("kv_b_proj.weight") and split:
            found |= _split_latent(name, values, config)
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
        elif name.endswith(".sinks"):
            found[f"{name}.weight"] = values
        elif family == "gpt_oss" and ".experts." in name:
            found |= _experts_of_gpt_oss(name, values)
        elif ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, part = after.partition(".")
            stacked.setdefault(f"{before}.experts.{part}", {})[int(number)] = values
        else:
            found[name] = values.reshape(-1) if name.endswith("shared_expert_gate.weight") else values
    for name, parts in stacked.items():
        found[name] = np.stack([parts[index] for index in sorted(parts)])
    return found
