"""4-bit safetensors on the CPU kernels: the file's weights, packed, and rows with the same bits in any pass."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.backends.cpu.decoder import load_cpu_decoder
from foreword.backends.cpu.grouped import as_blocks, packed_blocks, readable_blocks
from foreword.backends.cpu.packing import FORMATS, default_format
from foreword.models.formats.checkpoint import GroupedTensor, open_checkpoint
from helpers.cpu import cpu_decoder, needs_cpu_kernels
from helpers.packed_models import SCHEMES, compressed_int4, gptq, words, write_packed
from helpers.passes import all_logits

pytestmark = needs_cpu_kernels

KEPT = ["awq", "compressed int4", "symmetric", "gptq"]
NAME = "model.layers.0.mlp.up_proj.weight"
TOKENS = [3, 17, 5, 29, 11, 2, 8, 31, 30, 1, 4, 12]


def symmetric(rows: int, columns: int):
    """compressed-tensors without zero points."""
    parts, _ = compressed_int4(rows, columns)
    levels, scales = torch.randint(0, 16, (rows, columns)), parts["weight_scale"]
    parts = {"weight_packed": words(levels), "weight_scale": scales, "weight_shape": parts["weight_shape"]}
    return parts, scales.float().repeat_interleave(32, dim=1) * (levels - 8)


def in_order(rows: int, columns: int):
    """GPTQ whose groups lie side by side."""
    parts, numbers = gptq(rows, columns)
    order = parts["g_idx"].long().argsort(stable=True)
    levels = torch.stack([(parts["qweight"].T >> 4 * place) & 15 for place in range(8)], dim=-1).flatten(1)
    parts |= {"qweight": words(levels[:, order]).T.contiguous(), "g_idx": parts["g_idx"][order]}
    return parts, numbers[:, order]


@pytest.fixture(params=KEPT)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A packed model, and the numbers that its matrices stand for."""
    torch.manual_seed(len(request.param))
    makers = {"symmetric": ("compressed int4", symmetric), "gptq": ("gptq", in_order)}
    scheme, maker = makers.get(request.param, (request.param, None))
    if maker is not None:
        monkeypatch.setitem(SCHEMES, scheme, (maker, SCHEMES[scheme][1]))
    return tmp_path, write_packed(tmp_path, scheme)


def test_weights_are_exactly_the_files(model):
    path, numbers = model
    checkpoint = open_checkpoint(path)
    decoder = load_cpu_decoder(checkpoint, FORMATS["stored"], threads=2)
    layer = decoder._weights.layers[0]
    for name, matrix in (layer.mixing | layer.mlp).items():
        assert matrix.format in ("q4_0", "q4_z")
        expected = numbers[f"model.layers.0.{name}.weight"].float()
        row = torch.empty(matrix.cols)
        for index in range(matrix.rows):
            matrix.expand_row(index, row, decoder.isa)
            assert torch.equal(row, expected[index])
        assert matrix.nbytes <= matrix.rows * matrix.cols * 0.6 + 8192  # slack that prefetches read
    assert default_format(checkpoint, "avx512-vnni")[0] == FORMATS["stored"]
    assert default_format(checkpoint, "neon-dotprod")[0] == FORMATS["int8"]


def test_passes_are_near_those_of_the_unpacked_weights(model):
    path, _ = model
    exact = all_logits(cpu_decoder(path, "float32"), TOKENS)
    packed = all_logits(cpu_decoder(path, "stored"), TOKENS)
    assert (packed - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_in_passes_of_any_size(model, threads: int):
    path, _ = model
    decoder = cpu_decoder(path, "stored", threads=threads)
    together = all_logits(decoder, TOKENS)
    last = [all_logits(decoder, TOKENS[:count])[-1] for count in range(1, len(TOKENS) + 1)]
    assert torch.equal(together, torch.stack(last))


def test_columns_in_another_order_are_unpacked(tmp_path: Path):
    torch.manual_seed(1)
    numbers = write_packed(tmp_path, "gptq")  # desc_act
    checkpoint = open_checkpoint(tmp_path)
    assert packed_blocks(checkpoint, NAME) is None
    assert default_format(checkpoint, "avx512-vnni")[0] == FORMATS["int8"]
    exact = all_logits(cpu_decoder(tmp_path, "float32"), TOKENS)
    rounded = all_logits(cpu_decoder(tmp_path, "auto"), TOKENS)
    assert (rounded - exact).norm() / exact.norm() < 0.03
    assert torch.equal(checkpoint.load(NAME, torch.float32), numbers[NAME].float())


def test_what_blocks_cannot_hold_exactly_is_not_kept():
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
    kept = GroupedTensor(codes, torch.full((8, 2), 0.5, dtype=torch.bfloat16), None)
    assert as_blocks(kept) is not None
    tiny = torch.full((8, 2), 2.0**-30, dtype=torch.bfloat16)
    assert as_blocks(replace(kept, scales=tiny)) is None
    assert as_blocks(replace(kept, scales=torch.full((8, 2), torch.nan))) is None
    assert as_blocks(replace(kept, scales=torch.full((8, 2), torch.inf))) is None  # unpacking refuses them
    assert as_blocks(replace(kept, scales=torch.ones(8, 4))) is None  # groups of 16
    assert as_blocks(replace(kept, floats=True)) is None
    assert as_blocks(replace(kept, order=torch.arange(64).int())) is None
    assert as_blocks(None) is None
    assert readable_blocks(lambda _: replace(kept, scales=torch.ones(7, 2)), NAME) is None  # rows are missing
