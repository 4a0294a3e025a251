"""Every supported architecture equals transformers on a tiny random model, from both file formats."""

from pathlib import Path

import pytest
import torch

from foreword.backends.choice import DTYPES
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.models.formats.checkpoint import open_checkpoint
from helpers.passes import DEVICES, all_logits
from helpers.tiny_models import TINY_VOCAB, make_hf_model, write_gguf

CASES = [
    ("llama", True, {}),
    ("llama", False, {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}),
    ("llama", False, {"attention_bias": True, "mlp_bias": True}),
    ("llama", True, {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 20}),
    ("llama3", False, {}),
    ("llama3", True, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("mistral", False, {}),
    ("qwen2", True, {}),
    ("qwen2", False, {"num_key_value_heads": 4}),
    ("qwen3", True, {}),
    ("qwen3", False, {"num_attention_heads": 3, "num_key_value_heads": 3}),
]
GGUF_CASES = [case for case in CASES if "attention_bias" not in case[2] and case[0] != "mistral"]


def tokens(count: int) -> list[int]:
    return torch.randint(0, TINY_VOCAB, (count,), generator=torch.Generator().manual_seed(7)).tolist()


def load(path: Path, device: str, dtype: str = "float32") -> TorchDecoder:
    checkpoint = open_checkpoint(path)
    return TorchDecoder(checkpoint.config, load_weights(checkpoint, DTYPES[dtype], torch.device(device)))


@torch.inference_mode()
def transformers_logits(path: Path, ids: list[int], device: str = "cpu") -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    return model(torch.tensor([ids], device=device)).logits[0].cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("architecture", "tied", "overrides"), CASES)
def test_logits_equal_transformers(
    tmp_path: Path, architecture: str, tied: bool, overrides: dict, device: str
):
    path = make_hf_model(tmp_path, architecture, tied=tied, **overrides)
    ids = tokens(200)
    ours = all_logits(load(path, device), ids)
    theirs = transformers_logits(path, ids, device)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("architecture", "tied", "overrides"), GGUF_CASES)
def test_a_gguf_file_gives_the_same_logits(tmp_path: Path, architecture: str, tied: bool, overrides: dict):
    path = make_hf_model(tmp_path / "hf", architecture, tied=tied, **overrides)
    write_gguf(path, tmp_path / "model.gguf")
    ids = tokens(150)
    expected = all_logits(load(path, "cpu"), ids)
    torch.testing.assert_close(
        all_logits(load(tmp_path / "model.gguf", "cpu"), ids), expected, atol=1e-4, rtol=0
    )


def test_sharded_safetensors_give_the_same_logits(tmp_path: Path):
    whole = make_hf_model(tmp_path / "whole", seed=3)
    sharded = make_hf_model(tmp_path / "sharded", seed=3, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    ids = tokens(40)
    assert torch.equal(all_logits(load(whole, "cpu"), ids), all_logits(load(sharded, "cpu"), ids))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(tmp_path: Path, dtype: str, device: str):
    path = make_hf_model(tmp_path)
    ids = tokens(60)
    exact, half = all_logits(load(path, "cpu"), ids), all_logits(load(path, device, dtype), ids)
    assert half.dtype == torch.float32
    assert (half - exact).norm() / exact.norm() < (2e-2 if dtype == "bfloat16" else 5e-3)
