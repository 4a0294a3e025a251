"""Divergences against laws that can be worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foreword.bench.pair import RuleAnswer, combined, coupled_agreement, divergence, expectations, merged
from foreword.proofs.suite import coupled_agreement as drawn_agreement
from helpers.bench_runs import PLAIN_RUN

P = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.6, 0.2]], dtype=torch.float64)


def test_two_laws_at_temperature_one():
    found = divergence(P.log(), Q.log(), 1.0)
    assert found.tv == pytest.approx(0.3)
    assert found.token == pytest.approx(0.7)
    assert found.kl == pytest.approx(float((P * (P / Q).log()).sum()))
    assert found.same_top == 0
    assert found.chosen == pytest.approx(0.3)


def test_greedy_laws_are_all_or_nothing():
    found = divergence(torch.cat([P, P]).log(), torch.cat([P, Q]).log(), 0.0)
    assert (found.tv, found.same_top, found.coupled, found.chosen) == (0.5, 0.5, 0.5, 0.5)
    assert found.kl is None


def test_the_coupled_rule_accepts_what_shared_noise_agrees_on():
    rng = np.random.default_rng(0)
    for _ in range(4):
        p, q = rng.dirichlet([0.4] * 8), rng.dirichlet([0.6] * 8)
        drawn = drawn_agreement(p, q, 40_000, seed=1)
        exact = float(coupled_agreement(torch.from_numpy(p)[None], torch.from_numpy(q)[None])[0])
        assert abs(exact - drawn.agreed) < 5 * drawn.error
        assert exact >= drawn.bound - 1e-9


def test_equal_laws_agree_always():
    found = divergence(P.log(), P.log(), 0.7)
    assert (found.tv, found.coupled, found.same_top) == pytest.approx((0, 1, 1))


def test_means_are_over_places():
    one, other = (
        divergence(P.log(), P.log(), 1.0),
        divergence(torch.cat([P] * 3).log(), torch.cat([Q] * 3).log(), 1.0),
    )
    assert combined([one, other]).tv == pytest.approx(0.225)
    assert combined([one, other]).places == 4


def answer(rule: str, kind: str = "chat", **figures) -> RuleAnswer:
    run = replace(PLAIN_RUN, tokens=0, passes=0, seconds=1.0, verify_seconds=0.0, accept_seconds=0.0)
    return RuleAnswer(rule, 0.0, kind, replace(run, **figures))


def test_what_to_expect_follows_from_acceptance_and_times():
    plain = answer("plain", tokens=10, passes=10, verify_seconds=1.0)
    levels = {"drafted_per_position": (10, 10), "accepted_per_position": (8, 4)}
    drafted = answer("token", tokens=20, passes=10, **levels, draft_seconds=0.2, verify_seconds=1.4)
    one, two = expectations([plain, drafted], draft_tokens=2)
    assert (one.k, one.tokens_per_pass) == (1, pytest.approx(1.8))
    assert one.cost == pytest.approx(0.1 + 1.2)  # a guess is a tenth of a pass, two rows a fifth more
    assert two.tokens_per_pass == pytest.approx(2.2)
    assert two.speedup == pytest.approx(2.2 / (0.2 + 1.4))


def test_runs_are_added_up_by_rule_and_temperature():
    levels = {"drafted_per_position": (2,), "accepted_per_position": (1,)}
    answers = [answer("token", kind, tokens=4, passes=2, **levels) for kind in ("chat", "code")]
    (together,) = merged(answers, by_kind=False)
    assert (together.run.tokens, together.run.drafted_per_position, together.run.per_position) == (
        8,
        (4,),
        [0.5],
    )
    assert len(merged(answers, by_kind=True)) == 2
