"""Writes tiny checkpoints with recurrent layers as GGUF, as llama.cpp's converter does.

The facts are those of llama.cpp's `conversion/qwen.py`, `granite.py`, `nemotron.py` and `mamba.py`. Names come from the
tables of the gguf package.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from helpers.tiny_gguf import _write_tokenizer as write_tokenizer

Arrays = dict[str, np.ndarray]

_PERIOD = ["linear_attention", "full_attention"] * 2
_NEMOTRON = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {"layer_types": _PERIOD, "mlp_only_layers": []}, {}),
    "qwen3_next, older": (
        "qwen3_next",
        {"layer_types": _PERIOD, "mlp_only_layers": []},
        {"older": True},
    ),
    "qwen3_5": ("qwen3_5", {"layer_types": _PERIOD}, {"modules": 1}),
    "qwen3_5, as many key heads": ("qwen3_5", {"layer_types": _PERIOD, "linear_num_key_heads": 4}, {}),
    "qwen3_5_moe": ("qwen3_5_moe", {"layer_types": _PERIOD}, {}),
    "granite_hybrid": ("granite_hybrid", {}, {}),
    "granite_dense": ("granite_dense", {"position_embedding_type": None}, {}),
    "granite_dense, rotated": ("granite_dense", {}, {"rotated": True}),
    "bamba": ("bamba", {}, {}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": _NEMOTRON, "head_dim": 24}, {}),
    "nemotron_h, experts": (
        "nemotron_h",
        {"layers_block_type": [kind.replace("mlp", "moe") for kind in _NEMOTRON]},
        {"modules": 1},
    ),
}
"""Family and settings of `make_family`, which GGUF can state, and arguments of `write_hybrid_gguf`."""

_ARCHITECTURES = {
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "BambaForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
}
_TILED = (gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE)
_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def write_hybrid_gguf(
    directory: Path,
    path: Path,
    *,
    quant: str | None = None,
    older: bool = False,
    modules: int = 0,
    rotated: bool | None = None,
) -> Path:
    """The model of a directory that `make_family` made.

    `quant` is how matrices are stored whose rows are whole blocks. `older`: Qwen3-Next from before its fused projection
    was split. `modules`: MTP modules after the layers. `rotated`: Granite's switch for rotary embeddings.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = len(_kinds(config))
    architecture = _architecture(config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_sizes(writer, config, modules)
    if "linear_num_key_heads" in config:
        _write_delta(writer, config)
    else:
        _write_mamba(writer, config, modules, rotated)
    write_tokenizer(writer, directory, config["vocab_size"])
    arrays: Arrays = load_file(directory / "model.safetensors")
    tensors = _stacked_experts(_converted(arrays, architecture, config, older))
    names = gguf.get_tensor_name_map(architecture, len(_kinds(config)))
    for name, values in tensors.items():
        bare = name.endswith((".A_log", ".D"))
        stored = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        _add(writer, stored, values, None if bare else quant)
    for module in range(len(_kinds(config)), len(_kinds(config)) + modules):
        writer.add_tensor(f"blk.{module}.nextn.eh_proj.weight", np.ones((4, 8), np.float32))
        writer.add_tensor(f"blk.{module}.attn_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, quant: str | None) -> None:
    floats = np.ascontiguousarray(values, dtype=np.float32)
    kept = floats.ndim == 1 or any(part in name for part in ("conv1d", "ssm_norm", "ffn_gate_inp."))
    if quant is None or kept or floats.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant]][0]:
        writer.add_tensor(name, floats)
        return
    kind = gguf.GGMLQuantizationType[quant]
    writer.add_tensor(name, gguf.quants.quantize(floats, kind), raw_dtype=kind)


def _kinds(config: dict[str, Any]) -> list[str]:
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds is not None:
        return list(kinds)
    attention = config["attn_layer_indices"]
    return [
        "full_attention" if index in attention else "linear_attention"
        for index in range(config["num_hidden_layers"])
    ]


def _architecture(config: dict[str, Any]) -> gguf.MODEL_ARCH:
    name = config["architectures"][0]
    if name == "NemotronHForCausalLM":
        has_experts = "moe" in _kinds(config)
        return gguf.MODEL_ARCH.NEMOTRON_H_MOE if has_experts else gguf.MODEL_ARCH.NEMOTRON_H
    return _ARCHITECTURES[name]


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], modules: int) -> None:
    kinds = _kinds(config)
    writer.add_block_count(len(kinds) + modules)
    if modules:
        writer.add_nextn_predict_layers(modules)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("layer_norm_epsilon") or config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if rope := config.get("rope_parameters"):
        writer.add_rope_freq_base(rope["rope_theta"])
    experts = config.get("num_experts") or config.get("num_local_experts")
    if "moe" in kinds:
        experts = config["n_routed_experts"]
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    keys = (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    )
    for key in keys:
        if key in config and (experts or key == "shared_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config[key])
    for key, stored in _SCALES.items():
        if config.get(key):
            writer.add_float32(f"{writer.arch}.{stored}", config[key])


def _write_delta(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    if "num_experts" not in config:  # published mixtures of Qwen3.5 have none
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(_kinds(config).index("full_attention") + 1)
    partial = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * partial))
    if writer.arch != "qwen3next":
        writer.add_rope_dimension_sections([1, 1, 0, 0])


def _write_mamba(writer: gguf.GGUFWriter, config: dict[str, Any], modules: int, rotated: bool | None) -> None:
    kinds = _kinds(config)
    is_bamba, is_nemotron = config["model_type"] == "bamba", config["model_type"] == "nemotron_h"
    kv_heads = config["num_key_value_heads"]
    attends = [kind == "full_attention" for kind in kinds] + [True] * modules
    writer.add_head_count_kv([kv_heads if has else 0 for has in attends])
    writer.add_rope_scaling_finetuned(is_bamba if rotated is None else rotated)
    writer.add_context_length(config["max_position_embeddings"] if is_bamba else 2**20)
    turned = config["hidden_size"] // config["num_attention_heads"]
    if is_bamba:
        turned = int(turned * config["rope_parameters"]["partial_rotary_factor"])
    writer.add_rope_dimension_count(turned)
    if is_nemotron:
        width = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
        has_mlp = [kind in ("mlp", "moe") for kind in kinds] + [True] * modules
        writer.add_feed_forward_length([width if has else 0 for has in has_mlp])
        heads, width = config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"]
        keys = ("conv_kernel", "ssm_state_size", "n_groups")
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
        heads, width = config["mamba_n_heads"], config["mamba_expand"] * config["hidden_size"]
        keys = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups")
    writer.add_ssm_conv_kernel(config[keys[0]])
    writer.add_ssm_state_size(config[keys[1]])
    writer.add_ssm_group_count(config[keys[2]])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(width)


def _converted(arrays: Arrays, architecture: gguf.MODEL_ARCH, config: dict[str, Any], older: bool) -> Arrays:
    found: Arrays = {}
    for name, values in arrays.items():
        if "linear_num_key_heads" in config:
            found |= _of_delta(name, values, architecture, config, older)
        else:
            found |= _of_mamba(name, values, config)
    return found


def _common(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    if name.endswith(".A_log"):
        values = -np.exp(values)
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif name.endswith("conv1d.weight"):
        values = values.squeeze(1)
    return name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def _of_delta(
    name: str, values: np.ndarray, architecture: gguf.MODEL_ARCH, config: dict[str, Any], older: bool
) -> Arrays:
    if architecture in _TILED and ".linear_attn." in name:
        values = _tiled(name, values, config)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    if name.endswith("in_proj_qkvz.weight"):
        block = f"blk.{name.split('.')[2]}."
        if older:
            return {f"{block}ssm_in.weight": values}
        key, groups = config["linear_key_head_dim"], config["linear_num_key_heads"]
        value = config["linear_value_head_dim"] * config["linear_num_value_heads"] // groups
        parts = np.split(
            values.reshape(groups, -1, values.shape[-1]), (key, 2 * key, 2 * key + value), axis=1
        )
        query, keys, value_rows, gate = (part.reshape(-1, values.shape[-1]) for part in parts)
        return {
            f"{block}attn_qkv.weight": np.concatenate((query, keys, value_rows)),
            f"{block}attn_gate.weight": gate,
        }
    name, values = _common(name, values)
    return {name: values.reshape(-1) if name.endswith("shared_expert_gate.weight") else values}


def _tiled(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """The value heads in the order of their numbers within a key head."""
    groups, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    each, keys = config["linear_num_value_heads"] // groups, 2 * groups * config["linear_key_head_dim"]

    def turned(rows: np.ndarray, size: int) -> np.ndarray:
        return rows.reshape(groups, each, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if ".in_proj_qkv." in name or ".conv1d." in name:
        return np.concatenate((values[:keys], turned(values[keys:], width)))
    if ".in_proj_z." in name:
        return turned(values, width)
    if name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
        return turned(values, 1)
    return turned(values.T, width).T if ".out_proj." in name else values


def _of_mamba(name: str, values: np.ndarray, config: dict[str, Any]) -> Arrays:
    parts = name.split(".")
    block = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    if parts[-2] in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if parts[-2] == "q_proj" else "num_key_value_heads"]
        values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
    elif parts[-1] in ("A_log", "D"):
        values = values.reshape(-1, 1)
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        values = values.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
    elif "input_linear" in name:
        suffix = _granite_suffix(name, config)
        gate, up = np.split(values, 2, axis=-2)
        return {f"{block}ffn_gate{suffix}.weight": gate, f"{block}ffn_up{suffix}.weight": up}
    elif "shared_mlp.output_linear" in name:
        return {f"{block}ffn_down{_granite_suffix(name, config)}.weight": values}
    name, values = _common(name, values)
    return {name.replace(".mixer.dt_proj.", ".mixer.dt."): values}


def _granite_suffix(name: str, config: dict[str, Any]) -> str:
    if "block_sparse_moe" in name:
        return "_exps"
    return "_shexp" if config["num_local_experts"] else ""


def _stacked_experts(tensors: Arrays) -> Arrays:
    stacked: dict[str, dict[int, np.ndarray]] = {}
    found: Arrays = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"\w+\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            found[name] = values
        else:
            stored = f"blk.{match[1]}.ffn_{match[3]}_exps.weight"
            stacked.setdefault(stored, {})[int(match[2])] = values
    return found | {name: np.stack([held[i] for i in sorted(held)]) for name, held in stacked.items()}
