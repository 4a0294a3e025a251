"""Writes heads in speculators' layout: converts them (also from pickles), or quantises them to 8 or 4 bits."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from foreword.errors import CheckpointError, RequestError
from foreword.models.config import AttentionSpec, ModelConfig
from foreword.models.heads.files import pickled_files
from foreword.models.heads.names import FOREWORD_FORMAT, LAYER_IDS, PACKED, PART_SUFFIXES, SCALE, SHAPE
from foreword.models.heads.opening import Head, open_head

_OUTER_KEYS = frozenset(
    "acceptance_by_level architectures auto_map bias draft_vocab_size dtype eagle_config fc_norm norm_before_fc "
    "norm_before_residual norm_output num_aux_hidden_states quantization_config target_hidden_size target_layer_ids "
    f"torch_dtype transformers_version use_aux_norm {LAYER_IDS}".split()
)
"""Keys that do not describe the head's layers, in a config without `transformer_layer_config`."""


def write_head(
    head: Head, out: Path, tensors: Mapping[str, Tensor], extra: Mapping[str, Any] | None = None
) -> int:
    """Write a head, with `extra` keys in its config.json, into a new directory; return the bytes of its files."""
    if out.exists():
        raise RequestError(f"{out} exists; give a new directory")
    if head.spec.kind == "mtp":
        raise RequestError(f"{head.files.path}: an MTP module belongs to its target's files and stays there")
    out.mkdir(parents=True)
    stored = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    config = speculators_config(head) | dict(extra or {})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sum(file.stat().st_size for file in out.iterdir())


class HeadSizes(NamedTuple):
    """Sizes of a head's Llama layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int


def head_sizes(target: ModelConfig) -> HeadSizes:
    """Return the sizes of a head for this target: those of its first grouped-query attention and its widest MLP."""
    grouped = (layer.attention for layer in target.layers if layer.has_attention)
    attention = next((attention for attention in grouped if attention.latent is None), None)
    if attention is None:
        dim = min(128, target.hidden_size)  # the usual head size, since latent attention has none to copy
        heads = target.hidden_size // dim
        attention = AttentionSpec(heads, heads, dim)
    widths = [0]  # of each MLP: neurons that are computed per token
    for layer in target.layers:
        experts = layer.mlp.experts
        routed = 0 if experts is None else experts.per_token * experts.size
        widths.append(layer.mlp.intermediate_size + routed)
    return HeadSizes(attention.num_heads, attention.num_kv_heads, attention.head_dim, max(widths))


def layer_config(
    target: ModelConfig, intermediate: int | None = None, num_layers: int = 1, window: int | None = None
) -> dict[str, Any]:
    """Return a Hugging Face config.json of a Llama model with the target's sizes, and `window` in all its layers."""
    sizes = head_sizes(target)
    window_keys: dict[str, Any] = {}
    if window is not None:
        window_keys = {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": window}
    return window_keys | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate or sizes.intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": target.norm.eps,
        "rope_theta": target.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab_size,
    }


def stored_tensors(head: Head) -> dict[str, Tensor]:
    """Return the head's stored tensors, by canonical names, without those that it takes from the target."""
    used = {*head.spec.shapes, *(name + suffix for name in head.spec.shapes for suffix in PART_SUFFIXES)}
    return {name: head.files.stored(name) for name in head.files.stored_names() if name in used}


def speculators_config(head: Head) -> dict[str, Any]:
    """Return the config.json of a written head: in speculators' format for EAGLE-3, otherwise the head's own."""
    spec, given = head.spec, dict(head.files.config)
    if spec.kind == "medusa":  # vLLM's names and required keys
        return given | {"vocab_size": spec.vocab_size, "medusa_fc_bias": spec.has("blocks.0.layers.0.bias")}
    if spec.kind != "eagle3":
        return given
    inner = head.files.fields.section("transformer_layer_config")
    layer = dict(inner.values) if inner else {k: v for k, v in given.items() if k not in _OUTER_KEYS}
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": spec.draft_vocab_size,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.has("input_norm.weight"),
        "fc_norm": spec.has("fc_norm.0.weight"),
        "norm_output": spec.norm_output,
        "target_hidden_size": spec.target_hidden_size,
        "transformer_layer_config": layer | {"model_type": layer.get("model_type", "llama")},
    }
    if spec.boundaries is not None:
        config[LAYER_IDS] = list(spec.boundaries)
    copied = ("speculators_config", "speculators_version", "quantization_config", "acceptance_by_level")
    return config | {key: given[key] for key in copied if key in given}


GROUP = 64  # number of columns that share a scale

ROUNDED_BITS = (8, 4)  # bits per weight to which a head can be quantised


def quantize_head(head: Head, out: Path, bits: int = 8) -> int:
    """Write the head with quantised matrices and the rest as it is into a new directory; return the bytes written."""
    tensors: dict[str, Tensor] = {}
    for name, shape in head.spec.shapes.items():
        if len(shape) == 2:
            tensors |= rounded_parts(name, head.load(name), bits)
        else:
            tensors[name] = head.files.stored(name)
    return write_head(head, out, tensors, {"quantization_config": rounding_settings(bits)})


def rounded_parts(name: str, matrix: Tensor, bits: int) -> dict[str, Tensor]:
    """Return the tensors that store the quantised matrix `name` = "x.weight".

    8 bits: int8 levels, and `x.weight_scale`, float16 [rows, groups]. 4 bits: the format of compressed-tensors, with
    eight levels in an int32 of `x.weight_packed`.
    """
    levels, scales = rounded_levels(matrix, bits)
    if bits == 8:
        return {name: levels.contiguous(), name + SCALE: scales}
    rows, columns = levels.shape
    codes = levels.int() + 8  # 0 .. 15: compressed-tensors stores unsigned numbers
    words = pad(codes, (0, -columns % 8)).view(rows, -1, 8)  # 8 codes per word
    packed = (words << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    return {name + PACKED: packed, name + SCALE: scales, name + SHAPE: torch.tensor([rows, columns])}


def rounding_settings(bits: int) -> dict[str, Any]:
    """Return the quantization_config of a quantised head."""
    if bits == 8:
        return {"quant_method": FOREWORD_FORMAT, "bits": 8, "group_size": GROUP}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [],
    }


def rounded_levels(matrix: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Quantise a matrix: return levels, int8 [rows, columns], and scales [rows, groups of `GROUP` columns]."""
    rows, columns = matrix.shape
    if bits == 4 and columns % GROUP:  # compressed-tensors has whole groups
        raise RequestError(
            f"a matrix of {columns} columns cannot be rounded to 4 bits, since {columns} is not a multiple of {GROUP}; "
            "use 8 bits"
        )
    groups = -(-columns // GROUP)
    padded = pad(matrix, (0, groups * GROUP - columns)).view(rows, groups, GROUP)
    if bits == 8:
        low, high = -127, 127
        scales = (padded.abs().amax(-1) / high).half()
    else:
        low, high = -8, 7
        scales = torch.maximum(padded.amax(-1) / high, padded.amin(-1) / low).bfloat16()
    # If a scale underflows to 0, all levels of its group are 0.
    levels = padded / scales.float().where(scales > 0, torch.inf)[..., None]
    return levels.round().clamp(low, high).to(torch.int8).flatten(1)[:, :columns], scales


def convert_head(path: Path, out: Path) -> int:
    """Write a head in speculators' layout into a new directory; return its size in bytes."""
    pickles = pickled_files(path)
    if not pickles:
        head = open_head(path)
        return write_head(head, out, stored_tensors(head))
    with TemporaryDirectory() as folder:
        plain = Path(folder)
        save_file(_unpickled(pickles), plain / "model.safetensors", {"format": "pt"})
        config = (path if path.is_dir() else path.parent) / "config.json"
        if not config.exists():
            raise CheckpointError(f"{config} is missing; get the whole head")
        shutil.copyfile(config, plain / "config.json")
        head = open_head(plain)
        return write_head(head, out, stored_tensors(head))


def _unpickled(files: list[Path]) -> dict[str, Tensor]:
    """Return the tensors in pickled files; torch's loader runs no code from them."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises various exceptions for damaged or malicious files
            reason = " ".join(str(error).split())[:120]
            raise CheckpointError(f"{file} holds more than tensors, or is damaged: {reason}") from None
        if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
            raise CheckpointError(f"{file} is not a mapping of names to tensors; get the head again")
        tensors |= {str(name): tensor.contiguous().clone() for name, tensor in content.items()}
    return tensors
