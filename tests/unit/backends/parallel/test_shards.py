"""Which share of a model each rank has, and what cannot be shared."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.backends.choice import parallel_backend
from foreword.backends.parallel.shards import Shard, ShardCheckpoint, check_size
from foreword.backends.parallel.workers import Workers
from foreword.errors import RequestError
from foreword.models.config import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, MlpSpec
from foreword.models.formats.checkpoint import WHOLE, ModelFile, TensorPart, open_checkpoint
from foreword.models.formats.hf.checkpoint import HfCheckpoint
from foreword.models.layer_shapes import expected_shapes
from helpers.adapters import ADAPTED
from helpers.random_checkpoint import RandomCheckpoint

BIASED = replace(
    ADAPTED,
    vocab_size=31,
    tied_embeddings=False,
    layers=(
        LayerSpec(
            AttentionSpec(8, 4, 6, bias=True, output_bias=True, qk_norm=True, wide_qk_norm=True),
            MlpSpec(24, bias=True),
        ),
    ),
)
LATENT = replace(
    ADAPTED,
    layers=(
        LayerSpec(
            AttentionSpec(4, 4, 12, latent=LatentSpec(10, 6, 8, 4, 5)),
            MlpSpec(8, experts=ExpertsSpec(3, 2, 12)),
        ),
    ),
)
ONE_KV_HEAD = replace(ADAPTED, layers=(LayerSpec(AttentionSpec(4, 1, 6), MlpSpec(8)),))


class WholeInMemory(RandomCheckpoint):
    def load_part(self, name: str, dtype: torch.dtype, part: TensorPart) -> torch.Tensor:
        return part.of(self.load(name, dtype))


def shares(whole: ModelFile, size: int) -> list[ShardCheckpoint]:
    return [ShardCheckpoint(whole, Shard(rank, size)) for rank in range(size)]


@pytest.mark.parametrize(("config", "size"), [(BIASED, 2), (BIASED, 4), (LATENT, 2), (LATENT, 4)])
def test_the_shares_of_all_ranks_are_the_whole(config, size: int):
    whole = WholeInMemory(config)
    ranks = shares(whole, size)
    for name, shape in expected_shapes(config).items():
        expected = whole.load(name, torch.float32)
        parts = [rank.load(name, torch.float32) for rank in ranks]
        own = expected_shapes(ranks[0].config)[name]
        assert {tuple(part.shape) for part in parts} == {own}
        if name.endswith(("o_proj.bias", "down_proj.bias")):  # added to a sum over all ranks
            assert torch.equal(sum(parts), expected)
        elif own == shape:
            assert all(torch.equal(part, expected) for part in parts)
        elif own[0] != shape[0]:
            joined = torch.cat(parts)
            assert torch.equal(joined[: len(expected)], expected)
            assert not joined[len(expected) :].any()
        else:
            assert torch.equal(torch.cat(parts, dim=1), expected)


def test_ranks_that_share_a_kv_head_all_have_it():
    for config, heads in ((ONE_KV_HEAD, [0, 0, 0, 0]), (replace_kv(ONE_KV_HEAD, 2), [0, 0, 1, 1])):
        whole = WholeInMemory(config)
        keys = whole.load("model.layers.0.self_attn.k_proj.weight", torch.float32)
        for rank, head in zip(shares(whole, 4), heads, strict=True):
            own = rank.load("model.layers.0.self_attn.k_proj.weight", torch.float32)
            assert torch.equal(own, keys[6 * head : 6 * head + 6])
            assert rank.config.layers[0].attention.num_kv_heads == 1


def replace_kv(config, heads: int):
    layer = config.layers[0]
    return replace(config, layers=(replace(layer, attention=replace(layer.attention, num_kv_heads=heads)),))


@pytest.mark.parametrize(
    ("config", "size", "line"),
    [
        (ADAPTED, 4, "tensor_parallel_size 4 does not fit this llama model: it has 6 heads; use 1 or 2"),
        (replace_kv(BIASED, 3), 2, "it has 3 KV heads"),
        (LATENT, 3, "it has 4 heads; use 1 or 2 or 4"),
        (ADAPTED, 0, "must be in 1 .. 64, not 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_line(config, size: int, line: str):
    with pytest.raises(RequestError) as refusal:
        check_size(config, size)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_widths_of_mlps_and_experts_count_too():
    layer = BIASED.layers[0]
    odd = replace(BIASED, layers=(layer, replace(layer, mlp=MlpSpec(25))))
    with pytest.raises(RequestError, match="an MLP of width 25"):
        check_size(odd, 2)
    mixed = replace(BIASED, layers=(replace(layer, mlp=MlpSpec(0, experts=ExpertsSpec(4, 2, 9))),))
    with pytest.raises(RequestError, match="experts of width 9"):
        check_size(mixed, 2)


def test_torch_alone_runs_several_ranks():
    assert [parallel_backend(name, 2) for name in ("auto", "torch")] == ["torch", "torch"]
    assert parallel_backend("cpu", 1) == "cpu"
    with pytest.raises(RequestError, match="needs the torch backend; leave out --backend cpu"):
        parallel_backend("cpu", 2)


def test_every_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RequestError, match="needs as many GPUs from cuda:1 on, and there are 2"):
        Workers(2, torch.device("cuda:1"))


def test_a_rank_reads_its_share_and_nothing_else(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    read: dict[str, TensorPart] = {}
    real = HfCheckpoint._tensor

    def noted(self: HfCheckpoint, stored: str, part: TensorPart = WHOLE) -> torch.Tensor:
        read[stored] = part
        return real(self, stored, part)

    monkeypatch.setattr(HfCheckpoint, "_tensor", noted)
    rank = ShardCheckpoint(open_checkpoint(tiny_model), Shard(1, 2))
    for name in rank.tensor_names():
        rank.load(name, torch.float32)
    whole = {name for name, part in read.items() if part == WHOLE}
    assert all(name.endswith("norm.weight") for name in whole)
    assert read["model.layers.0.self_attn.o_proj.weight"] == TensorPart(columns=(32, 64))
    assert read["model.embed_tokens.weight"] == TensorPart(rows=(180, 360))
