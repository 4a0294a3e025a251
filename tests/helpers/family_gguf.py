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
}
_PERMUTED = ("granite", "smollm3", "mixtral")
_NUMBERS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_COUNTS = {
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}


def write_family_gguf(family: str, directory: Path, path: Path) -> Path:
    """The model of a directory that `make_family` made."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_hyperparameters(writer, config)
    write_tokenizer(writer, directory, config["vocab_size"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, values in _tensors(family, directory, config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(values, dtype=np.float32))
    _write_rope(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _write_hyperparameters(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
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
    writer.add_rope_dimension_count(int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        for kind in ("long", "short"):
            writer.add_tensor(
                f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32)
            )


def _tensors(family: str, directory: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    weights: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    stacked: dict[str, dict[int, np.ndarray]] = {}
    found: dict[str, np.ndarray] = {}
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if family in _PERMUTED and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, part = after.partition(".")
            stacked.setdefault(f"{before}.experts.{part}", {})[int(number)] = values
        else:
            found[name] = values.reshape(-1) if name.endswith("shared_expert_gate.weight") else values
    for name, parts in stacked.items():
        found[name] = np.stack([parts[index] for index in sorted(parts)])
    return found
