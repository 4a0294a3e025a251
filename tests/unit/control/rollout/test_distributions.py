"""The law of answers, not the answers, is what drawing rules keep."""

import json
import math
from random import Random

import pytest

from foreword.control.rollout.distributions import (
    LEAST_ANSWER_PAIRS,
    NAMES,
    DistributionComparison,
    Figures,
    figures_of,
)

TOKENS, LENGTH, PAIRS = 12, 40, 200


def answer(rng: Random, heat: float = 1.0, stop: float = 0.01) -> Figures:
    """A text in which every token makes some others likelier; `heat` is what a wrong rule does to it."""
    tokens, logprobs, ranks, last = [], [], [], 0
    while len(tokens) < LENGTH and (not tokens or rng.random() > stop):
        weights = [math.exp(-((token - 5 * last) % TOKENS) / 2) for token in range(TOKENS)]
        drawn = [weight ** (1 / heat) for weight in weights]
        last = rng.choices(range(TOKENS), drawn)[0]
        tokens.append(last)
        logprobs.append(math.log(weights[last] / sum(weights)))
        ranks.append(1 + sum(weight > weights[last] for weight in weights))
    return figures_of(tokens, logprobs, ranks)


def verdict(seed: int, pairs: int = PAIRS, **wrong: float) -> str | None:
    rng, laws = Random(seed), DistributionComparison()
    for number in range(pairs):
        laws.add(answer(rng), answer(rng, **wrong))
        found = laws.difference(is_last=number + 1 == pairs)
        if found is not None:
            return found
    return None


def test_the_same_law_is_hardly_ever_called_another():
    assert sum(verdict(seed, pairs=60) is not None for seed in range(40)) <= 1


@pytest.mark.parametrize("wrong", [{"heat": 1.2}, {"heat": 0.8}, {"stop": 0.03}])
def test_another_law_is_found(wrong: dict[str, float]):
    assert all((verdict(seed, **wrong) or "").startswith("distribution: ") for seed in range(3))


def test_a_change_that_shows_in_no_probability_shows_in_the_tokens():
    """Every token for its neighbour: as likely, as long, and not the same."""
    same = [figures_of([token] * 9, [-1.0] * 9, [1] * 9) for token in (1, 2)]
    rng, laws = Random(0), DistributionComparison()
    for _ in range(LEAST_ANSWER_PAIRS):
        laws.add(same[rng.random() < 0.1], same[rng.random() < 0.9])
    found = laws.difference(is_last=True)
    assert found is not None
    assert "token ids" in found


def test_a_few_answers_say_nothing():
    laws = DistributionComparison()
    for _ in range(LEAST_ANSWER_PAIRS - 1):
        laws.add((0.0,) * len(NAMES), (1.0,) * len(NAMES))
    assert laws.difference(is_last=True) is None
    laws.add((0.0,) * len(NAMES), (1.0,) * len(NAMES))
    assert laws.difference(is_last=False) is not None


def test_it_is_kept_over_a_restart_and_nonsense_is_refused():
    rng, laws = Random(3), DistributionComparison()
    for _ in range(30):
        laws.add(answer(rng), answer(rng, heat=2.0))
    kept = json.loads(json.dumps(laws.as_json()))
    assert (
        DistributionComparison.from_json(kept).difference(is_last=True)
        == laws.difference(is_last=True)
        is not None
    )
    for nonsense in ({**kept, "sums": [1.0]}, {**kept, "pairs": -1}, {**kept, "squares": [math.inf] * 12}):
        with pytest.raises(ValueError, match="is invalid"):
            DistributionComparison.from_json(nonsense)
