"""GGUF files of models with recurrent layers: the same numbers as in the safetensors, and as transformers computes."""

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from foreword import LLM, SamplingParams
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.formats.gguf.checkpoint import GgufCheckpoint
from foreword.models.layer_shapes import expected_shapes
from helpers.cpu import cpu_decoder, needs_cpu_kernels
from helpers.hybrid_gguf import CASES, write_hybrid_gguf
from helpers.passes import all_logits, torch_decoder
from helpers.tiny_families import make_family
from helpers.trees import random_tokens

WIDE = {"intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
"""Rows of whole blocks."""
ROUNDED = 0.4
"""Rounding inputs to 8 bits changes logits of tiny random models so much, from safetensors too; a wrong order, by 1."""


def written(root: Path, case: str, quant: str | None = None, **changes: object) -> tuple[Path, Path]:
    """The directory, and the GGUF file made of it."""
    family, settings, arguments = CASES[case]
    directory, _ = make_family(root / "hf", family, **(settings | changes))
    return directory, write_hybrid_gguf(directory, root / "model.gguf", quant=quant, **arguments)


@pytest.mark.parametrize("case", list(CASES))
def test_a_gguf_file_gives_the_same_logits(tmp_path: Path, case: str):
    family, settings, arguments = CASES[case]
    directory, theirs = make_family(tmp_path / "hf", family, **settings)
    ours = torch_decoder(write_hybrid_gguf(directory, tmp_path / "model.gguf", **arguments))
    assert ours.config.architecture == torch_decoder(directory).config.architecture
    ids = random_tokens(random.Random(6), 80)  # more than a chunk
    logits = all_logits(ours, ids)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    for other in (all_logits(torch_decoder(directory), ids), expected):
        assert float((logits - other).abs().max()) <= 1e-4 * float(other.abs().max())


@pytest.mark.parametrize("case", list(CASES))
def test_every_tensor_is_that_of_the_safetensors(tmp_path: Path, case: str):
    directory, path = written(tmp_path, case)
    stored, source = open_checkpoint(path), open_checkpoint(directory)
    for name in expected_shapes(source.config):
        expected = source.load(name, torch.float32)
        torch.testing.assert_close(stored.load(name, torch.float32), expected, atol=1e-6, rtol=1e-6)
        if expected.ndim == 2 and not name.endswith("conv1d.weight"):
            pieces = torch.cat(list(stored.pieces(name, torch.float32, 24)))
            assert torch.equal(pieces, stored.load(name, torch.float32)), name


BLOCKS = [
    ("qwen3_next", "Q4_0", {}),
    ("qwen3_5", "Q8_0", {"linear_value_head_dim": 32}),
    ("qwen3_5", "Q4_0", {"linear_value_head_dim": 16}),
    ("qwen3_5_moe", "Q5_0", {"linear_value_head_dim": 32}),
    ("granite_dense", "Q8_0", {"shared_intermediate_size": 64}),
    ("bamba", "Q4_1", {}),
    ("nemotron_h", "Q4_0", {}),
]


@needs_cpu_kernels
@pytest.mark.parametrize(("case", "quant", "changes"), BLOCKS)
def test_blocks_are_kept_in_our_order(tmp_path: Path, case: str, quant: str, changes: dict[str, object]):
    known = WIDE if "moe" in case or case == "qwen3_next" else {"intermediate_size": 64}
    _, path = written(tmp_path, case, quant, **(known | changes))
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GgufCheckpoint)
    kept = set()
    for name, shape in expected_shapes(checkpoint.config).items():
        blocks = checkpoint.quantized(name)
        if blocks is None:
            continue
        kept.add(".".join(name.split(".")[-3:]))
        assert blocks.shape == shape
        floats = gguf.quants.dequantize(
            np.ascontiguousarray(blocks.data), gguf.GGMLQuantizationType[blocks.kind]
        )
        assert torch.equal(torch.from_numpy(floats), checkpoint.load(name, torch.float32)), name
    assert {"linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"} <= kept
    straddling = changes.get("linear_value_head_dim") == 16  # blocks of 32 columns reach over two heads
    assert ("linear_attn.out_proj.weight" in kept) == (not straddling)
    ids = random_tokens(random.Random(7), 70)
    expected = all_logits(torch_decoder(path), ids)
    floats = all_logits(cpu_decoder(path, "float32"), ids)
    assert (floats - expected).norm() / expected.norm() < 1e-4
    rounded = all_logits(cpu_decoder(path, "stored"), ids)
    assert (rounded - expected).norm() / expected.norm() < ROUNDED


@needs_cpu_kernels
def test_speculation_from_a_gguf_file_gives_the_same_text(tmp_path: Path):
    _, path = written(tmp_path, "qwen3_5", "Q8_0", intermediate_size=64, linear_value_head_dim=32)
    prompt, sampling = random_tokens(random.Random(8), 30), SamplingParams(max_tokens=80, seed=5)
    llm = LLM(str(path), device="cpu", backend="cpu", speculation=None)
    plain = llm.generate([prompt], [sampling])[0].outputs[0].token_ids
    llm.speculate({"method": "ngram", "prompt_lookup_min": 1, "fixed": True})
    output = llm.generate([prompt], [sampling])[0]
    assert output.outputs[0].token_ids == plain
    assert output.timings.draft_n > 0
