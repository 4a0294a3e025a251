"""Latent attention by the book, number by number, against the decoder; stored pairs in both orders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.formats.hf.config import hf_config
from foreword.models.layer_shapes import expected_shapes
from helpers.cpu import INSTRUCTION_SETS, cpu_decoder, needs_cpu_kernels
from helpers.passes import all_logits, torch_decoder

SETTINGS = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "kv_lora_rank": 10,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
}
IDS = [3, 17, 4, 44, 9, 28, 5]


def write(path: Path) -> ModelConfig:
    names = frozenset({"model.layers.0.input_layernorm.weight"})
    config = hf_config(SETTINGS, names, path)
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in expected_shapes(config).items()
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(SETTINGS))
    return config


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def turned(x: torch.Tensor) -> torch.Tensor:
    """Pairs that stand side by side, [positions, ..., 4], as complex numbers times e^(i * angle)."""
    angles = torch.arange(len(x)).float()[:, None] * torch.tensor([1.0, 1e4**-0.5])
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 2, 2).contiguous())
    factor = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(pairs * (factor[:, None] if x.dim() == 3 else factor)).flatten(-2)


def by_the_book(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    get = {name.removeprefix("model.").removeprefix("layers.0."): tensor for name, tensor in weights.items()}
    stream = get["embed_tokens.weight"][IDS]
    x = norm(stream, get["input_layernorm.weight"])
    queries = (x @ get["self_attn.q_proj.weight"].T).view(len(IDS), 3, 10)
    row = x @ get["self_attn.kv_a_proj_with_mqa.weight"].T
    latent = norm(row[:, :10], get["self_attn.kv_a_layernorm.weight"])
    expanded = (latent @ get["self_attn.kv_b_proj.weight"].T).view(len(IDS), 3, 11)
    keys = torch.cat((expanded[..., :6], turned(row[:, 10:])[:, None].expand(-1, 3, -1)), -1)
    queries = torch.cat((queries[..., :6], turned(queries[..., 6:])), -1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * 10**-0.5
    scores += torch.full((len(IDS), len(IDS)), -torch.inf).triu(1)
    attended = torch.einsum("hqk,khv->qhv", scores.softmax(-1), expanded[..., 6:]).flatten(1)
    stream = stream + attended @ get["self_attn.o_proj.weight"].T
    x = norm(stream, get["post_attention_layernorm.weight"])
    inner = torch.nn.functional.silu(x @ get["mlp.gate_proj.weight"].T) * (x @ get["mlp.up_proj.weight"].T)
    stream = stream + inner @ get["mlp.down_proj.weight"].T
    return norm(stream, get["norm.weight"]) @ get["embed_tokens.weight"].T


def test_logits_by_the_book(tmp_path: Path):
    write(tmp_path)
    expected = by_the_book(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(all_logits(torch_decoder(tmp_path), IDS), expected, atol=1e-4, rtol=1e-4)


@needs_cpu_kernels
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_logits_by_the_book_on_the_cpu_kernels(tmp_path: Path, isa: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    write(tmp_path)
    expected = by_the_book(load_file(tmp_path / "model.safetensors"))
    exact, rounded = (all_logits(cpu_decoder(tmp_path, form), IDS) for form in ("float32", "int8"))
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=1e-4)
    assert 1e-5 < float((rounded - expected).norm() / expected.norm()) < 0.05


@needs_cpu_kernels
def test_the_cpu_kernels_keep_one_short_row_once(tmp_path: Path):
    write(tmp_path)
    decoder = cpu_decoder(tmp_path, "int8")
    store = decoder.new_kv_store(2, 16)
    assert store.bytes_per_row == decoder.kv_rows().bytes_per_row == 16 * 2  # 14 numbers, padded
    assert 0 < decoder.layer_bytes < decoder.weight_bytes
    keys, values = store.arrays("decoder")
    assert (keys.shape, values.numel()) == ((1, 2, 1, 16, 16), 0)


def test_a_token_keeps_one_short_row(tmp_path: Path):
    write(tmp_path)
    rows = torch_decoder(tmp_path).kv_rows()
    assert (rows.num_kv_heads, rows.head_dim, rows.values) == (1, 14, 0)
    assert rows.bytes_per_row == 14 * 4  # and not 3 heads of 10 and 5 numbers


def test_pairs_that_stand_half_apart_are_left_there(tmp_path: Path):
    write(tmp_path)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    stored = load_file(tmp_path / "model.safetensors")[name]
    assert torch.equal(open_checkpoint(tmp_path).load(name, torch.float32)[10:], stored[[10, 12, 11, 13]])
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"rope_interleave": False}))
    assert torch.equal(open_checkpoint(tmp_path).load(name, torch.float32), stored)
