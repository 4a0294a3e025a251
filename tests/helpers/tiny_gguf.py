"""Writes a tiny Hugging Face model as a GGUF file, so that tests can compare the two formats."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

_GGUF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(hf_dir: Path, path: Path, quant: str = "F32", **metadata: Any) -> Path:
    """Write the model in `hf_dir` as GGUF with its matrices stored as `quant`; vectors stay F32.

    `metadata` adds or replaces string, bool, int or float keys, with "__" standing for "." in their names.
    """
    config = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    architecture = _GGUF_ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_hyperparameters(writer, config)
    _write_tokenizer(writer, hf_dir, config["vocab_size"])
    for key, value in metadata.items():
        _add_plain_value(writer, key.replace("__", "."), value)
    _write_tensors(writer, hf_dir, config, gguf.GGMLQuantizationType[quant])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": "default"}
    return rope | (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _write_hyperparameters(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = _rope(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _write_tokenizer(writer: gguf.GGUFWriter, hf_dir: Path, vocab_size: int) -> None:
    """Embeddings with more rows get entries of type UNUSED, as llama.cpp's converter writes them."""
    stored = json.loads((hf_dir / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((hf_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in stored["added_tokens"]}
    vocab = stored["model"]["vocab"] | special
    tokens = sorted(vocab, key=vocab.__getitem__)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    padding = [f"[PAD{number}]" for number in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens + padding)
    types = [control if token in special else normal for token in tokens]
    writer.add_token_types(types + [int(gguf.TokenType.UNUSED)] * len(padding))
    writer.add_token_merges([" ".join(merge) for merge in stored["model"]["merges"]])
    writer.add_bos_token_id(special[settings["bos_token"]])
    writer.add_eos_token_id(special[settings["eos_token"]])
    writer.add_add_bos_token(False)
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def _add_plain_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    for entries in writer.kv_data:
        entries.pop(key, None)
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _write_tensors(
    writer: gguf.GGUFWriter, hf_dir: Path, config: dict[str, Any], quant: gguf.GGMLQuantizationType
) -> None:
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(hf_dir.glob("*.safetensors")):
        weights |= load_file(shard)
    for name, weight in weights.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        values = _permuted(name, weight.float().numpy(), config)
        kind = quant if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind))
        else:
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    if _rope(config)["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(llama3_factors(config), dtype=np.float32))


def _gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def _permuted(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Rows of q and k in the order of GGUF's `llama`: rotated pairs side by side, not half a head apart."""
    if _GGUF_ARCHITECTURES[config["architectures"][0]] != "llama":
        return values
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
        name.split(".")[-2]
    )
    if heads is None:
        return values
    halves = values.reshape(heads, 2, -1, *values.shape[1:])  # [heads, half, head_dim / 2, ...]
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def llama3_factors(config: dict[str, Any]) -> list[float]:
    """By how much llama3 rope scaling slows each rotary frequency."""
    rope = _rope(config)
    dim, original = _head_dim(config), rope["original_max_position_embeddings"]
    factors = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / dim)
        if wavelength < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (original / wavelength - rope["low_freq_factor"]) / span
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors
