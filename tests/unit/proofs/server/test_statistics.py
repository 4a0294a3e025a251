"""The bounds are exact: alarms on true laws are as rare as they claim, and stated biases are seen."""

from itertools import product

import numpy as np
import pytest

from foreword.proofs.server import evidence as alarms
from foreword.proofs.server.evidence import BETS, contrast, fisher, log_evidence, most_distance, visible_bias


def test_the_shares_of_false_alarms_stay_within_the_family():
    assert alarms.OWN_LOGPROBS + alarms.WITHOUT_SPECULATION + alarms.COPIES < alarms.FAMILY


def test_the_gamblers_have_in_the_mean_what_they_began_with():
    chances = np.array([[0.1, 0.5], [0.7, 0.2], [0.3, 0.9], [0.05, 0.5]])
    mean = 0.0
    for outcomes in product((0, 1), repeat=4):
        first = np.array(outcomes, dtype=bool)
        for others in product((0, 1), repeat=4):
            happened = np.stack([first, np.array(others, dtype=bool)], axis=1)
            likely = np.where(happened, chances, 1 - chances).prod()
            mean += likely * np.exp(log_evidence(chances, happened))
    assert mean == pytest.approx(1.0)


@pytest.mark.parametrize("alarm", [0.01, alarms.OWN_LOGPROBS])
def test_true_laws_raise_as_few_alarms_as_promised(alarm):
    rng = np.random.default_rng(3)
    runs, draws = 20_000, 60
    chances = rng.beta(0.7, 2.0, (draws, 1))
    happened = rng.random((draws, runs)) < chances
    logs = BETS[:, None] * happened.sum(axis=0) - np.log1p(chances * np.expm1(BETS)).sum(axis=0)[:, None]
    share = float((np.exp(logs).mean(axis=0) >= 1 / alarm).mean())
    assert share <= alarm + 4 * np.sqrt(alarm / runs)


def test_a_bias_of_the_stated_size_is_seen():
    rng = np.random.default_rng(4)
    chances = rng.beta(1.0, 4.0, (4_000, 1))
    visible = visible_bias(chances[:, 0], len(BETS), alarms.OWN_LOGPROBS)
    forced = visible / float((1 - chances).mean())
    biased = chances + forced * (1 - chances)
    seen = [
        log_evidence(chances, rng.random(chances.shape) < biased) >= np.log(1 / alarms.OWN_LOGPROBS)
        for _ in range(300)
    ]
    assert np.mean(seen) >= 0.9
    assert visible < 0.1


def test_fishers_test_is_exact():
    left, right = 7, 9
    for law in (0.2, 0.5):
        chance = {
            (a, b): _binomial(a, left, law) * _binomial(b, right, law)
            for a in range(left + 1)
            for b in range(right + 1)
        }
        for alarm in (0.3, 0.1, 0.01):
            wrong = sum(p for (a, b), p in chance.items() if fisher(a, b, left, right) <= alarm)
            assert wrong <= alarm


def _binomial(k: int, n: int, p: float) -> float:
    from math import comb

    return comb(n, k) * p**k * (1 - p) ** (n - k)


def test_which_sample_had_a_rare_text_first_plays_no_part():
    one = [f"left {k}" for k in range(200)]
    other = [f"right {k}" for k in range(200)]
    assert contrast(one, other).p == contrast(other, one).p
    rng = np.random.default_rng(5)
    rare = [[str(v) for v in rng.integers(0, 3_000, 300)] for _ in range(2)]
    assert contrast(*rare).p > 1e-3


def test_a_different_law_is_seen():
    rng = np.random.default_rng(6)
    one, other = rng.choice(list("abcd"), 2_000), rng.choice(list("abcd"), 2_000, p=[0.4, 0.2, 0.2, 0.2])
    found = contrast(list(one), list(other))
    assert found.p < 1e-6
    assert found.cell == "a"


def test_the_bound_on_the_distance_holds():
    rng = np.random.default_rng(7)
    law, true = np.full(10, 0.1), np.array([0.19] + [0.09] * 9)
    bounds = [most_distance(rng.multinomial(500, true).astype(float), law) for _ in range(200)]
    assert np.mean([bound >= 0.09 for bound in bounds]) >= 0.95
