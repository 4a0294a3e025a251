"""Mixtures of experts on kernels: choices, blocks and products as torch computes them, in any company."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword.backends.torch import experts as reference
from foreword.backends.torch.weights import ExpertWeights
from foreword.models.config import ExpertsSpec, GroupScore, MlpSpec, Scores
from foreword.models.formats.checkpoint import GroupedTensor, QuantizedTensor
from helpers.cuda import KERNEL_DEVICE, assert_same_sums, comparable_numbers, has_gpu, needs_triton

pytestmark = needs_triton

PLAIN = ExpertsSpec(count=6, per_token=2, size=20)
GROUPED = ExpertsSpec(12, 3, 20, scale=1.5, groups=4, top_groups=2)
SPECS = {
    "softmax": PLAIN,
    "normalized": replace(PLAIN, per_token=3, normalize=True),
    "biased and clamped": replace(PLAIN, normalize=True, bias=True, clamp=0.4),
    "groups by their best": GROUPED,
    "groups by their two best": replace(
        GROUPED, scores=Scores.SIGMOID, normalize=True, corrected=True, group_score=GroupScore.TOP2
    ),
}
SPARE, HIDDEN, ROWS = 99, 32, 5


def weights_of(spec: ExpertsSpec, dtype: torch.dtype = torch.float32, gated: bool = True) -> ExpertWeights:
    inner = (2 if gated else 1) * spec.size
    return ExpertWeights(
        router=comparable_numbers(spec.count, HIDDEN) / 8,
        correction=comparable_numbers(spec.count) / 8 if spec.corrected else None,
        gate_up=comparable_numbers(spec.count, inner, HIDDEN, dtype=dtype) / 8,
        down=comparable_numbers(spec.count, HIDDEN, spec.size, dtype=dtype) / 8,
        shared_gate=None,
        router_bias=comparable_numbers(spec.count) if spec.bias else None,
        gate_up_bias=comparable_numbers(spec.count, inner, dtype=dtype) / 4 if spec.bias else None,
        down_bias=comparable_numbers(spec.count, HIDDEN, dtype=dtype) / 4 if spec.bias else None,
    )


def slots(*taken: int) -> Tensor:
    return torch.tensor(taken, dtype=torch.int32, device=KERNEL_DEVICE)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("undecided", [False, True])
def test_experts_are_those_of_the_reference_and_of_equals_the_lower(name: str, undecided: bool):
    from foreword.backends.cuda.kernels.routing import route

    spec = SPECS[name]
    weights, normed = weights_of(spec), comparable_numbers(ROWS, HIDDEN)
    if undecided:
        zeros = torch.zeros_like(weights.router)
        weights = replace(weights, router=zeros, correction=None, router_bias=None)
    chosen, shares = reference.route(spec, weights, normed)
    parts = torch.stack([normed[:, k] @ weights.router[:, k].T for k in (slice(0, 16), slice(16, HIDDEN))])
    found, counted, there = route(parts, weights, spec, slots(0, SPARE, 2, 3, 4), SPARE)
    real = [0, 2, 3, 4]
    assert found[real].tolist() == chosen[real].tolist()
    torch.testing.assert_close(counted[real], shares[real], atol=1e-6, rtol=1e-5)
    assert found[1].tolist() == [spec.count] * spec.per_token, "padding takes no expert"
    assert there.sum(dim=1).tolist() == [spec.per_token, 0, *[spec.per_token] * 3]


@pytest.mark.parametrize("rows", [1, 4, 2100])
def test_every_pair_is_in_one_block_of_its_expert(rows: int):
    """Also of more pairs than a program takes at once; an expert may have many, one or none of them."""
    from foreword.backends.cuda.kernels.routing import sort_by_expert

    count, per_block = 5, 16
    chosen = torch.randint(0, count, (rows, 2), dtype=torch.int32)
    chosen[chosen == 3] = 1  # which nobody takes
    chosen[-1, 0] = count if rows > 1 else 0  # as padding has it
    blocks = sort_by_expert(chosen.to(KERNEL_DEVICE), count, per_block)
    assert len(blocks.experts) == min(chosen.numel(), chosen.numel() // per_block + count)
    found: dict[int, list[int]] = {}
    described = blocks.experts.tolist(), blocks.firsts.tolist(), blocks.counts.tolist()
    for expert, first, pairs in zip(*described, strict=True):
        assert 0 <= pairs <= per_block
        found.setdefault(expert, []).extend(blocks.order[first : first + pairs].tolist())
    flat = chosen.flatten()
    for expert in range(count):
        assert found.get(expert, []) == (flat == expert).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("activation", "gated"), [("silu", True), ("gelu_pytorch_tanh", True), ("relu2", False)]
)
@pytest.mark.parametrize("name", SPECS)
def test_a_mixture_says_what_the_reference_says(name: str, activation: str, gated: bool):
    from foreword.backends.cuda.experts import Mixture
    from foreword.backends.torch.layers import ACTIVATIONS

    spec, dtype = SPECS[name], torch.bfloat16 if has_gpu else torch.float32
    weights, normed = weights_of(spec, dtype, gated), comparable_numbers(ROWS, HIDDEN, dtype=dtype)
    parts = torch.full((spec.per_token, ROWS, HIDDEN), float("nan"), device=KERNEL_DEVICE)
    mixture = Mixture(MlpSpec(0, activation=activation, experts=spec, gated=gated), weights)
    mixture.forward(normed, slots(0, 1, SPARE, 3, 4), SPARE, parts)
    expected = reference.mixture(spec, weights, normed, ACTIVATIONS[activation])
    real = [0, 1, 3, 4]
    tolerance = 3e-2 if has_gpu else 1e-4
    torch.testing.assert_close(parts.sum(dim=0)[real], expected.float()[real], atol=tolerance, rtol=tolerance)
    assert parts[:, 2].isnan().all(), "padding has no parts"


def packed(weights: ExpertWeights) -> tuple[ExpertWeights[object], ExpertWeights]:
    """The same in MXFP4, of random codes, and these codes' numbers."""
    from foreword.backends.cuda.expert_packing import packed_experts

    both: list[tuple[object, Tensor]] = []
    for matrices, other in ((weights.gate_up, weights.down), (weights.down, weights.gate_up)):
        count, rows, columns = matrices.shape
        names = max(1, rows // other.shape[2])  # gate and up are stored one by one
        codes = torch.randint(0, 16, (count, rows, columns), dtype=torch.uint8)
        exponents = torch.randint(124, 128, (count, rows, columns // 32))
        scales = torch.exp2(exponents.float() - 128)
        stored = [
            [
                GroupedTensor(*half, None, floats=True)
                for half in zip(code.chunk(names), scale.chunk(names), strict=True)
            ]
            for code, scale in zip(codes, scales, strict=True)
        ]
        numbers = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12])[codes.long() & 7] * (1 - 2 * (codes.long() >> 3))
        plain = numbers * scales.repeat_interleave(32, dim=2)
        both.append((packed_experts(stored, matrices.dtype, KERNEL_DEVICE), plain.to(matrices)))
    (gate_up, plain_up), (down, plain_down) = both
    assert gate_up is not None and down is not None
    kept = replace(weights, gate_up=plain_up, down=plain_down)
    return replace(kept, gate_up=gate_up, down=down), kept


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [5, 300] if has_gpu else [3])
def test_experts_in_4_bits_say_the_same_as_unpacked_ones(rows: int, gated: bool):
    """Bit by bit: no number is rounded. K has groups that no tile ends with."""
    from foreword.backends.cuda.experts import Mixture

    spec, dtype = replace(PLAIN, size=96, bias=True, clamp=0.4), torch.bfloat16 if has_gpu else torch.float32
    mlp = MlpSpec(0, activation="silu" if gated else "relu2", experts=spec, gated=gated)
    both = packed(weights_of(spec, dtype, gated))
    normed = comparable_numbers(rows, HIDDEN, dtype=dtype)
    found = []
    for weights in both:
        parts = torch.full((spec.per_token, rows, HIDDEN), float("nan"), device=KERNEL_DEVICE)
        Mixture(mlp, weights).forward(normed, slots(*range(rows)), rows, parts)
        found.append(parts)
    assert not found[0].isnan().any()
    assert_same_sums(*found)


def test_weights_that_the_kernels_cannot_unpack_are_not_packed():
    from foreword.backends.cuda.expert_packing import packed_experts

    codes, scales = torch.zeros((4, 64), dtype=torch.uint8), torch.ones((4, 2))
    largest = GroupedTensor(codes, scales, None, floats=True)
    assert packed_experts([[largest]], torch.bfloat16, KERNEL_DEVICE) is not None
    for other in (
        GroupedTensor(codes, 2 * scales, None, floats=True),  # beyond the largest exponent
        GroupedTensor(codes, scales, None),  # whole numbers
        GroupedTensor(codes, scales[:, :1], None, floats=True),  # groups of 64
    ):
        assert packed_experts([[largest, other]], torch.bfloat16, KERNEL_DEVICE) is None


def test_blocks_of_gguf_are_packed_as_other_mxfp4():
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    from foreword.backends.cuda.expert_packing import packed_experts

    blocks = torch.randint(0, 256, (3, 2, 17), dtype=torch.uint8)
    blocks[..., 0] = torch.randint(110, 120, (3, 2))
    data = blocks.view(3, 34).numpy()
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=-1).flatten(1)
    other = GroupedTensor(codes, torch.exp2(blocks[..., 0].float() - 128), None, floats=True)
    numbers = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12])[codes.long() & 7] * (1 - 2 * (codes.long() >> 3))
    scaled = numbers * other.scales.repeat_interleave(32, dim=1)
    assert scaled.tolist() == dequantize(data, GGMLQuantizationType.MXFP4).tolist()
    found, expected = (
        packed_experts([[stored]], torch.bfloat16, torch.device("cpu"))
        for stored in (QuantizedTensor("MXFP4", data, (3, 64)), other)
    )
    assert found is not None and expected is not None
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.exponents, expected.exponents)


@pytest.mark.parametrize("packed_weights", [False, True])
def test_few_rows_of_a_large_block_are_as_in_a_small_one(packed_weights: bool):
    """An expert with more rows than the tail of a block, and one with fewer."""
    from foreword.backends.cuda.kernels.experts import expert_down, expert_gate_up
    from foreword.backends.cuda.kernels.linear import Tile
    from foreword.backends.cuda.kernels.routing import sort_by_expert

    spec, dtype = replace(PLAIN, count=2, per_token=1, size=32), torch.bfloat16 if has_gpu else torch.float32
    weights: ExpertWeights[Any] = weights_of(spec, dtype)
    if packed_weights:
        weights, _ = packed(weights)
    rows, mlp = 40, MlpSpec(0, experts=spec)
    chosen = torch.tensor(
        [[int(row % 10 == 3)] for row in range(rows)], dtype=torch.int32, device=KERNEL_DEVICE
    )
    x, shares = comparable_numbers(rows, HIDDEN, dtype=dtype), torch.ones((rows, 1), device=KERNEL_DEVICE)
    found = []
    for tile in (Tile(16, 64, 32, swapped=True), Tile(128, 64, 32, swapped=packed_weights)):
        blocks = sort_by_expert(chosen, spec.count, tile.rows)
        active, parts = x.new_zeros((rows, spec.size)), x.new_zeros((1, rows, HIDDEN), dtype=torch.float32)
        expert_gate_up(x, weights, blocks, mlp, active, tile)
        found.append(expert_down(active, weights, blocks, shares, parts, tile))
    assert found[0].count_nonzero(dim=2).all()
    assert_same_sums(*found)


@pytest.mark.parametrize("pairs", [8, 40, 200, 600] if has_gpu else [8, 200])
def test_a_row_has_the_same_parts_in_any_company(pairs: int):
    """Whatever tiles so many rows are computed in."""
    from foreword.backends.cuda.experts import Mixture

    spec, dtype = PLAIN, torch.bfloat16 if has_gpu else torch.float32
    rows = pairs // spec.per_token
    weights, normed = weights_of(spec, dtype), comparable_numbers(rows, HIDDEN, dtype=dtype)
    mixture = Mixture(MlpSpec(0, experts=spec), weights)

    def parts_of(x: Tensor) -> Tensor:
        parts = torch.full((spec.per_token, len(x), HIDDEN), float("nan"), device=KERNEL_DEVICE)
        mixture.forward(x, slots(*range(len(x))), rows, parts)
        return parts

    together = parts_of(normed)
    assert not together.isnan().any()
    for row in {0, rows // 2, rows - 1}:
        alone = parts_of(normed[row : row + 1])
        if has_gpu:
            assert torch.equal(alone[:, 0], together[:, row])
        else:
            torch.testing.assert_close(alone[:, 0], together[:, row], atol=1e-5, rtol=0)


def test_a_router_in_wider_numbers_than_the_weights_is_used_as_it_is():
    from foreword.backends.cuda.experts import Mixture

    weights = weights_of(PLAIN, torch.bfloat16)
    exact = Mixture(MlpSpec(0, experts=PLAIN), replace(weights, router=weights.router.bfloat16().float()))
    wide = Mixture(MlpSpec(0, experts=PLAIN), replace(weights, router=weights.router + 2**-12))
    assert (exact._router.dtype, wide._router.dtype) == (torch.bfloat16, torch.float32)
    normed = comparable_numbers(2, HIDDEN, dtype=torch.float32)
    found = wide._logits(normed).sum(dim=0)
    torch.testing.assert_close(found, normed @ (weights.router + 2**-12).T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_shared_expert_counts_by_its_gate(gated: bool, in_parts: bool):
    from foreword.backends.cuda.kernels.rows import gate_shared_expert

    said = comparable_numbers(2, 3, HIDDEN) if in_parts else comparable_numbers(3, HIDDEN)
    normed, gate = comparable_numbers(3, HIDDEN), comparable_numbers(1, HIDDEN) / 8
    out = torch.full((3, HIDDEN), float("nan"), device=KERNEL_DEVICE)
    gate_shared_expert(said, normed, gate if gated else None, out)
    expected = (said[0] + said[1]) if in_parts else said
    torch.testing.assert_close(out, expected * (normed @ gate.T).sigmoid() if gated else expected)
