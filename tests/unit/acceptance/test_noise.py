"""The noise: the same integers as the scalar reference, never 0 or 1, and good."""

import math

import numpy as np
import pytest
import torch

from foreword.acceptance import noise
from foreword.acceptance.noise import Stream, extend_keys, gumbel, key_tensor, stems, uniforms
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.proofs.coupled import noise_checks
from foreword.proofs.suite import NOISE_LIMIT
from helpers import rule_reference as reference

NAMES = [(0, 0, 0, 0, 0), (2**64 - 1, 3, 3, 7, 2**31), (12345678901234567890, 1, 2, 99, 17)]


@pytest.mark.parametrize("name", NAMES)
def test_integers_and_gumbels_are_those_of_the_reference(name: tuple[int, ...]):
    seed, sample, stream, nonce, position = name
    key = extend_keys(stems(seed, sample, Stream(stream), nonce), position)
    expected = reference.row_key(*name)
    assert int(key[0]) == expected
    ids = torch.tensor([0, 1, 2, 49151, 10**6])
    words = noise.bits(key_tensor(key).expand(5), ids).numpy().view(np.uint64)
    assert [int(word) for word in words] == [reference.bits(expected, int(i)) for i in ids]
    drawn = gumbel(key_tensor(key).expand(5), ids)
    assert drawn.tolist() == pytest.approx([reference.gumbel(expected, int(i)) for i in ids], rel=1e-14)
    assert float(uniforms(key)[0]) == reference.uniform(expected)


@pytest.mark.parametrize("word", [0, 1023, 1 << 63, 2**64 - 1, 2**63 - 1])
def test_no_word_makes_a_uniform_of_0_or_1_or_an_infinite_gumbel(word: int, monkeypatch: pytest.MonkeyPatch):
    signed = noise.signed64(word)
    monkeypatch.setattr(noise, "bits", lambda keys, tokens: torch.full_like(tokens, signed))
    monkeypatch.setattr(noise, "mix", lambda z: np.full_like(z, word))
    assert torch.isfinite(gumbel(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))).all()
    assert 0 < float(uniforms(np.zeros(1, np.uint64))[0]) < 1


def test_the_upper_tail_keeps_its_bits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(noise, "bits", lambda keys, tokens: torch.full_like(tokens, -1))
    top = gumbel(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert float(top[0]) == pytest.approx(54 * math.log(2), rel=1e-12)


def test_it_is_good():
    assert {c.name: c.deviation for c in noise_checks() if abs(c.deviation) > NOISE_LIMIT} == {}


def test_only_coupled_hands_the_drafter_the_targets_noise():
    def keys(rule: Rule, steps: int) -> list[int]:
        sampler = RequestSampler(SamplingParams(), TokenLimits(9), [1], seed=5, sample=2, rule=rule)
        for _ in range(steps):
            sampler.commit([1])
        return [int(key) for key in sampler.drafting().keys(np.arange(4))]

    target = [reference.row_key(5, 2, Stream.TARGET, 0, position) for position in range(4)]
    assert keys(Rule.COUPLED, 0) == keys(Rule.COUPLED, 3) == target
    for rule in (Rule.TOKEN, Rule.BLOCK):
        assert keys(rule, 3) == [reference.row_key(5, 2, Stream.DRAFT, 3, p) for p in range(4)]
        assert not {*keys(rule, 0)} & {*keys(rule, 1), *target}
