"""Which experts a row takes, and how much each counts; latent attention in both of its forms."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from foreword.backends.torch.attention import GroupView
from foreword.backends.torch.experts import mixture, route
from foreword.backends.torch.latent import absorbed, is_absorption_cheaper, naive
from foreword.backends.torch.weights import ExpertWeights, LatentWeights
from foreword.models.config import ExpertsSpec, GroupScore, LatentSpec, Scores

HIDDEN = 4


def experts_of(
    spec: ExpertsSpec, logits: list[float], correction: list[float] | None = None
) -> ExpertWeights:
    """Experts whose router says `logits` about a row of ones."""
    generator = torch.Generator().manual_seed(1)
    return ExpertWeights(
        router=torch.tensor(logits).unsqueeze(1).repeat(1, HIDDEN) / HIDDEN,
        correction=None if correction is None else torch.tensor(correction),
        gate_up=torch.randn(spec.count, 2 * spec.size, HIDDEN, generator=generator),
        down=torch.randn(spec.count, HIDDEN, spec.size, generator=generator),
        shared_gate=None,
    )


ROW = torch.ones(1, HIDDEN)


def test_ties_go_to_the_lower_numbers():
    spec = ExpertsSpec(count=6, per_token=3, size=2)
    chosen, share = route(spec, experts_of(spec, [0.0] * 6), ROW)
    assert chosen.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(share, torch.full((1, 3), 1 / 6))
    tied = experts_of(spec, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    assert route(spec, tied, ROW)[0].tolist() == [[1, 3, 5]]


def test_weights_sum_to_one_only_where_they_should():
    spec = ExpertsSpec(count=4, per_token=2, size=2, scale=3.0)
    weights = experts_of(spec, [1.0, 0.0, 2.0, -1.0])
    whole = torch.tensor([1.0, 0.0, 2.0, -1.0]).softmax(0)
    torch.testing.assert_close(route(spec, weights, ROW)[1], 3 * whole[[2, 0]].unsqueeze(0))
    normed = route(replace(spec, normalize=True), weights, ROW)[1]
    torch.testing.assert_close(normed.sum(), torch.tensor(3.0))


def test_the_correction_chooses_but_does_not_count():
    spec = ExpertsSpec(count=4, per_token=1, size=2, scores=Scores.SIGMOID, corrected=True)
    weights = experts_of(spec, [3.0, 0.0, 0.0, 0.0], correction=[0.0, 0.0, 5.0, 0.0])
    chosen, share = route(spec, weights, ROW)
    assert chosen.tolist() == [[2]]
    torch.testing.assert_close(share, torch.tensor([[0.5]]))


@pytest.mark.parametrize(("by", "expected"), [(GroupScore.MAX, [4, 5]), (GroupScore.TOP2, [0, 1])])
def test_experts_are_taken_from_the_best_groups(by: GroupScore, expected: list[int]):
    spec = ExpertsSpec(
        count=6, per_token=2, size=2, groups=3, top_groups=1, group_score=by, scores=Scores.SIGMOID
    )
    weights = experts_of(spec, [2.0, 1.9, 0.0, 0.0, 2.5, -3.0])
    assert route(spec, weights, ROW)[0].tolist() == [expected]


def test_an_expert_that_nobody_takes_is_not_read():
    spec = ExpertsSpec(count=3, per_token=1, size=2)
    weights = experts_of(spec, [5.0, 0.0, 0.0])
    weights.gate_up[1:] = torch.nan
    rows = torch.ones(3, HIDDEN)
    said = mixture(spec, weights, rows, silu)
    gate, up = (rows @ weights.gate_up[0].T).chunk(2, dim=-1)
    share = torch.tensor([5.0, 0.0, 0.0]).softmax(0)[0]
    torch.testing.assert_close(said, share * ((silu(gate) * up) @ weights.down[0].T))


def test_latent_attention_is_the_same_absorbed_and_naive():
    latent = LatentSpec(kv_rank=12, query_rank=None, nope_dim=6, rope_dim=4, value_dim=5)
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = LatentWeights(None, random(3, 6, 12), random(3, 5, 12))
    queries, rows = (random(2, 7, 3, 6), random(2, 7, 3, 4)), random(2, 20, 16)
    visible = torch.rand(2, 7, 20, generator=generator) < 0.6
    visible[..., 0] = True
    view = GroupView(torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 20, dtype=torch.int64), visible)
    ours = [form(latent, weights, queries, rows, view, 0.3) for form in (absorbed, naive)]
    torch.testing.assert_close(ours[0], ours[1], atol=1e-5, rtol=1e-5)
    assert ours[0].shape == (2, 7, 3, 5)


def test_few_queries_are_absorbed_and_many_are_not():
    v3 = LatentSpec(kv_rank=512, query_rank=1536, nope_dim=128, rope_dim=64, value_dim=128)
    assert is_absorption_cheaper(v3, 1)
    assert is_absorption_cheaper(v3, 64)
    assert not is_absorption_cheaper(v3, 512)
