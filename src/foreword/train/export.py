"""A trained head as files: the speculators layout of EAGLE-3, readable by vLLM and by us."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foreword.models.config import ModelConfig
from foreword.train.eagle3 import Eagle3Head
from foreword.train.vocabulary import DraftVocabulary

_PIECE_BYTES = 15_000_000


def head_tensors(head: Eagle3Head, vocabulary: DraftVocabulary, vocab_size: int) -> dict[str, Tensor]:
    """Names and tensors of the file; the scales of the taps are folded into the projection that reads them."""
    matrices = dict(head.matrices)
    scales = head.tap_scales.repeat_interleave(head.shape.hidden)
    tensors = {"fc.weight": matrices.pop("fc") * scales}
    for name, matrix in matrices.items():
        part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        tensors[f"layers.0.{part}.{name}.weight"] = matrix
    for name, norm in head.norms.items():
        tensors["norm.weight" if name == "norm" else f"layers.0.{name}.weight"] = norm
    tensors["lm_head.weight"] = head.lm_head
    tensors = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()
    }
    if head.shape.vocabulary < vocab_size:
        tensors["d2t"] = vocabulary.d2t.cpu()
        tensors["t2d"] = (vocabulary.draft_ids >= 0).cpu()
    return tensors


def head_config(
    head: Eagle3Head, target: ModelConfig, verifier: str, speculative_tokens: int
) -> dict[str, Any]:
    """config.json."""
    shape = head.shape
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": shape.vocabulary,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": shape.eps,
            "rope_theta": target.rope.theta,
            "rope_scaling": None,
            "max_position_embeddings": target.context_length,
            "vocab_size": target.vocab_size,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculative_tokens}],
            "verifier": {"name_or_path": verifier, "architectures": [_hf_class(target)]},
        },
    }


def write_head(
    directory: Path,
    head: Eagle3Head,
    vocabulary: DraftVocabulary,
    target: ModelConfig,
    *,
    verifier: str,
    speculative_tokens: int,
) -> None:
    """model.safetensors first, config.json last: a directory without a config is not taken for a head."""
    directory.mkdir(parents=True, exist_ok=True)
    config_path = directory / "config.json"
    config_path.unlink(missing_ok=True)
    partial = directory / "model.part"
    save_file(head_tensors(head, vocabulary, target.vocab_size), partial, {"format": "pt"})
    partial.replace(directory / "model.safetensors")
    partial = directory / "config.part"
    config = head_config(head, target, verifier, speculative_tokens)
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(config_path)


def write_pieces(directory: Path, source: Path) -> list[Path]:
    """A file cut into pieces that are small enough to be carried one by one; `cat` puts them together."""
    directory.mkdir(parents=True, exist_ok=True)
    data = source.read_bytes()
    paths = []
    for number, begin in enumerate(range(0, len(data), _PIECE_BYTES)):
        path = directory / f"{source.name}.{number:02d}"
        path.write_bytes(data[begin : begin + _PIECE_BYTES])
        paths.append(path)
    return paths


def _hf_class(target: ModelConfig) -> str:
    from foreword.models.architectures.registry import ARCHITECTURES

    return next(family.hf_class for family in ARCHITECTURES if family.name == target.architecture)
