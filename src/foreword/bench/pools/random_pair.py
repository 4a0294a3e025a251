"""A target and a draft model of named shapes with random weights, made where they are measured.

A draft without a shape of its own is the target's first layers. The others add little to what these say, so that its
guesses are mostly right, as a trained draft's are. Two models of different shapes agree because both were given the
same successor for every token but some, beside layers that cost their time and say little.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from foreword.models.config import ModelConfig

QUIET = 0.02
"""How much the layers that a draft does not have say, compared with its own."""

_END = "<|end|>"


def write_random_pair(config: ModelConfig, draft_layers: int, folder: Path) -> tuple[Path, Path]:
    """Directories of the target and of its draft, as transformers would write them."""
    tensors = _tensors(config, lambda layer: 1.0 if layer < draft_layers else QUIET)
    target, draft = folder / "target", folder / "draft"
    _write(target, config, len(config.layers), tensors)
    kept = {name: tensor for name, tensor in tensors.items() if _layer_of(name) < draft_layers}
    _write(draft, config, draft_layers, kept)
    return target, draft


def write_agreeing_pair(
    target: ModelConfig, draft: ModelConfig, agreement: float, folder: Path
) -> tuple[Path, Path]:
    """Directories of two models; after this part of all tokens the draft's guess is the target's own token."""
    size = target.vocab_size
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(size, generator=generator)
    follows = torch.empty_like(order)
    follows[order] = order.roll(-1)  # one circle of all tokens, so that texts pass by all kinds of them
    wrong = torch.randperm(size, generator=generator)[: round((1 - agreement) * size)]
    guessed = follows.clone()
    guessed[wrong] = follows[wrong].roll(1)
    written = []
    for name, config, after in (("target", target, follows), ("draft", draft, guessed)):
        untied = replace(config, vocab_size=size, tied_embeddings=False)
        tensors = _tensors(untied, lambda layer: QUIET)
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"][after] = embedding
        embedding *= config.hidden_size**0.5  # louder than all layers
        _write(folder / name, untied, len(config.layers), tensors)
        written.append(folder / name)
    return written[0], written[1]


def _layer_of(name: str) -> int:
    """-1: it belongs to none."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def _tensors(config: ModelConfig, gain_of: Callable[[int], float]) -> dict[str, Tensor]:
    """`gain_of` says how loud a layer is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    attention, mlp, width = config.layer.attention, config.layer.mlp.intermediate_size, config.hidden_size

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        numbers = torch.empty((rows, columns), dtype=torch.bfloat16, device=device)
        return numbers.normal_(0.0, gain * columns**-0.5, generator=generator).cpu()

    ones = torch.ones(width, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": matrix(config.vocab_size, width),
        "model.norm.weight": ones.clone(),
    }
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = matrix(config.vocab_size, width)
    for index in range(len(config.layers)):
        gain, layer = gain_of(index), f"model.layers.{index}."
        tensors |= {
            f"{layer}self_attn.q_proj.weight": matrix(attention.query_width, width),
            f"{layer}self_attn.k_proj.weight": matrix(attention.kv_width, width),
            f"{layer}self_attn.v_proj.weight": matrix(attention.kv_width, width),
            f"{layer}self_attn.o_proj.weight": matrix(width, attention.query_width, gain),
            f"{layer}mlp.gate_proj.weight": matrix(mlp, width),
            f"{layer}mlp.up_proj.weight": matrix(mlp, width),
            f"{layer}mlp.down_proj.weight": matrix(width, mlp, gain),
            f"{layer}input_layernorm.weight": ones.clone(),
            f"{layer}post_attention_layernorm.weight": ones.clone(),
        }
    return tensors


def _write(path: Path, config: ModelConfig, layers: int, tensors: dict[str, Tensor]) -> None:
    attention = config.layer.attention
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.layer.mlp.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "bfloat16",
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    _tokenizer(config.vocab_size).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END}), encoding="utf-8")


def _tokenizer(size: int) -> Tokenizer:
    """Bytes, and names for all other ids: nobody reads these texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<{number}>" for number in range(size - len(alphabet) - 1)), _END]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return tokenizer
