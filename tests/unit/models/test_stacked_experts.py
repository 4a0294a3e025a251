"""Experts of a layer in one tensor: plain or in MXFP4, every expert is read by itself, row by row gate and up."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foreword.backends.choice import BackendChoice
from foreword.errors import CheckpointError
from foreword.models.formats.checkpoint import open_checkpoint
from helpers.cuda import needs_triton
from helpers.tiny_families import change_config, make_family

EXPERTS, HIDDEN, SIZE = 4, 64, 32
LEVELS = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)


def random_blocks(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales, and the numbers [experts, rows, columns] that they stand for."""
    codes = torch.randint(0, 16, (EXPERTS, rows, columns // 32, 32))
    scales = torch.randint(120, 128, (EXPERTS, rows, columns // 32))
    numbers = LEVELS[codes] * torch.exp2(scales.float() - 127).unsqueeze(-1)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed.to(torch.uint8), scales.to(torch.uint8), numbers.flatten(2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_family(tmp_path / "plain", "gpt_oss", intermediate_size=SIZE)[0]


def test_plain_stacks_are_stored_the_other_way_round(model: Path):
    stored, checkpoint = load_file(model / "model.safetensors"), open_checkpoint(model)
    whole = stored["model.layers.1.mlp.experts.gate_up_proj"]  # [experts, in, gate and up in turn]
    for place, name in enumerate(("gate_proj", "up_proj")):
        found = checkpoint.load(f"model.layers.1.mlp.experts.2.{name}.weight", torch.float32)
        assert torch.equal(found, whole[2, :, place::2].T)
        bias = checkpoint.load(f"model.layers.1.mlp.experts.2.{name}.bias", torch.float32)
        assert torch.equal(bias, stored["model.layers.1.mlp.experts.gate_up_proj_bias"][2, place::2])
    down = checkpoint.load("model.layers.0.mlp.experts.3.down_proj.weight", torch.float32)
    assert torch.equal(down, stored["model.layers.0.mlp.experts.down_proj"][3].T)


def put_in_blocks(model: Path) -> dict[str, Tensor]:
    """Store the first layer's experts in MXFP4; return their numbers."""
    torch.manual_seed(0)
    stored, expected = load_file(model / "model.safetensors"), {}
    for name, rows, columns in (("gate_up_proj", 2 * SIZE, HIDDEN), ("down_proj", HIDDEN, SIZE)):
        stack = f"model.layers.0.mlp.experts.{name}"
        del stored[stack]
        stored[f"{stack}_blocks"], stored[f"{stack}_scales"], expected[name] = random_blocks(rows, columns)
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    change_config(model, quantization_config={"quant_method": "mxfp4"})
    return expected


def test_blocks_of_four_bits_are_unpacked(model: Path):
    expected = put_in_blocks(model)
    checkpoint = open_checkpoint(model)
    for expert in range(EXPERTS):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        for place, name in enumerate(("gate_proj", "up_proj")):
            found = checkpoint.load(f"{prefix}.{name}.weight", torch.float32)
            assert torch.equal(found, expected["gate_up_proj"][expert, place::2])
        found = checkpoint.load(f"{prefix}.down_proj.weight", torch.float32)
        assert torch.equal(found, expected["down_proj"][expert])


@needs_triton
def test_blocks_of_four_bits_stay_packed_for_a_gpu(model: Path):
    from foreword.backends.cuda.packing import load_packed

    expected = put_in_blocks(model)
    choice = BackendChoice("cuda", None, torch.float32, "", "int4")
    first, second = load_packed(open_checkpoint(model), choice, torch.device("cpu")).layers
    assert first.experts is not None and second.experts is not None
    assert isinstance(second.experts.down, Tensor), "it is not stored in blocks"
    experts = (first.experts.gate_up, "gate_up_proj"), (first.experts.down, "down_proj")
    for packed, name in experts:
        numbers = expected[name]  # gate and up in turn, as they are stored
        found = numbers_of(packed.codes, packed.exponents)
        assert torch.equal(found[:, : numbers.shape[1], : numbers.shape[2]], numbers)


def numbers_of(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the numbers [experts, N, K] that tensor cores get of codes and exponents (see `PackedExperts`)."""
    chunks, blocks = codes.shape[1:3]
    word = codes.int().view(EXPERTS, chunks, blocks, 8, 4, 4, 2)
    scale = (exponents.view(EXPERTS, chunks, blocks, 8, 1) >> 16 * (torch.arange(4) // 2))[..., None, :, None]
    pairs = word, word << 3, word << 6, word << 1 & 0x8000 | word >> 5 & 0x0100 | word >> 4 & 0x00C0
    by_row = [
        as_bf16(pair & 0x81C0) * as_bf16((scale >> 8 * (place % 2) & 255) << 7)
        for place, pair in enumerate(pairs)
    ]
    halves = torch.stack(by_row, dim=-1).view(*word.shape, 2, 2)  # of a pair of columns, of a pair of rows
    return halves.permute(0, 2, 8, 3, 1, 5, 7, 4, 6).reshape(EXPERTS, blocks * 16, chunks * 64)


def as_bf16(bits: Tensor) -> Tensor:
    return bits.short().view(torch.bfloat16).float()


def test_a_stack_with_fewer_experts_than_the_config_counts_is_refused(model: Path):
    change_config(model, num_local_experts=8)
    with pytest.raises(CheckpointError, match="has 4 experts and not 8"):
        open_checkpoint(model)
