"""What a pass reads of a mixture, as `foreword bench gpu` reports it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.bench.gpu.device import experts_read, idle_expert_parameters, matrix_operations, step_bytes
from foreword.bench.random_heads import write_random_head
from foreword.bench.random_models import SHAPES
from foreword.models.heads.opening import open_head
from foreword.models.layer_shapes import expected_shapes
from helpers.cuda import KERNEL_DEVICE, needs_triton
from helpers.mixed_configs import CONFIGS
from helpers.random_checkpoint import RandomCheckpoint
from helpers.tiny_families import family_config


@needs_triton
def test_a_token_reads_as_many_experts_as_it_takes():
    from foreword.backends.cuda.decoder import CudaDecoder

    config = CONFIGS["experts"]
    weights = load_weights(RandomCheckpoint(config), torch.float32, KERNEL_DEVICE)
    assert experts_read(CudaDecoder(config, weights), [[7]]) == 2
    assert experts_read(TorchDecoder(config, weights), [[7]]) is None
    dense = CONFIGS["scales"]
    weights = load_weights(RandomCheckpoint(dense), torch.float32, KERNEL_DEVICE)
    assert experts_read(CudaDecoder(dense, weights), [[7]]) is None


def test_operations_are_those_of_the_experts_that_tokens_take():
    config = CONFIGS["experts"]  # six experts of 40 in each of two layers, of which a token takes two
    decoder = TorchDecoder(
        config, load_weights(RandomCheckpoint(config), torch.bfloat16, torch.device("cpu"))
    )
    assert idle_expert_parameters(decoder) == 2 * 4 * 40 * 72 * 3
    routers = 2 * 6 * 72  # which are in float32
    numbers = decoder.layer_bytes / 2 - routers - idle_expert_parameters(decoder)
    assert matrix_operations(decoder, 7) == 2 * 7 * numbers


def test_a_step_reads_its_experts_and_no_embedding():
    tied, apart = CONFIGS["experts"], replace(CONFIGS["experts"], tied_embeddings=False)
    cpu, embedding = torch.device("cpu"), 2 * tied.vocab_size * tied.hidden_size
    for config, unread in ((tied, 0), (apart, embedding)):
        decoder = TorchDecoder(config, load_weights(RandomCheckpoint(config), torch.bfloat16, cpu))
        assert step_bytes(decoder, None) == decoder.weight_bytes - unread
        idle = 2 * 2 * 0.5 * 40 * 72 * 3  # half an expert of 40 in each of two layers, in 16 bits
        assert step_bytes(decoder, 5.5) == pytest.approx(decoder.weight_bytes - unread - idle)


def test_named_shapes_are_as_large_as_their_models():
    billions = {
        name: sum(torch.Size(shape).numel() for shape in expected_shapes(config).values()) / 1e9
        for name, config in SHAPES.items()
    }
    found = {name: round(size, 1) for name, size in billions.items()}
    assert found == {
        "llama-8b": 8.0,
        "llama-1b": 1.2,
        "smollm2-135m": 0.1,
        "qwen2.5-1.5b": 1.5,
        "gemma-3-12b": 11.8,
        "qwen3-30b-a3b": 30.5,
        "deepseek-v2-lite": 15.7,
        "gpt-oss-20b": 20.9,
        "qwen3.5-0.8b": 0.8,
        "lfm2-1.2b": 1.2,
        "qwen3.5-9b": 9.0,
        "qwen3-next-22b-a3b": 21.7,
    }


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_random_heads_fit_targets_of_any_family(family: str, tmp_path: Path):
    target = family_config(family)
    head = open_head(write_random_head("eagle3", target, tmp_path / "head")).fitted(target)
    assert head.spec.is_plain and len(head.spec.layers) == 1
