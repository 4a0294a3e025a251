"""What chance decides in a load: seeded, and distributed as said."""

import itertools
import math

import numpy as np
import pytest

from foreword.bench.prompts import BenchPrompt, own_prompts
from foreword.bench.serve.load import LoadSettings, arrival_times, drop_points, prompts_in_turn


def test_gaps_are_exponential_and_counts_are_poisson():
    rate, n = 4.0, 40_000
    times = np.array(list(arrival_times(LoadSettings(rate=rate, num_requests=n, seed=5))))
    gaps = np.diff(times, prepend=0.0)
    # Five standard errors of an exponential's mean (σ = mean) and variance (kurtosis 9).
    assert abs(gaps.mean() - 1 / rate) < 5 / rate / math.sqrt(n)
    assert abs(gaps.var() - 1 / rate**2) < 5 * math.sqrt(8 / n) / rate**2
    per_second = np.bincount(times.astype(int))[:-1]
    assert abs(per_second.var() / per_second.mean() - 1) < 5 * math.sqrt(2 / len(per_second))
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 5 / math.sqrt(n)


def test_arrivals_are_those_of_the_seed_at_any_length():
    def times(seed: int, n: int) -> list[float]:
        return list(arrival_times(LoadSettings(rate=2.0, num_requests=n, seed=seed)))

    assert times(1, 20) == times(1, 30)[:20]
    assert times(1, 20) != times(2, 20)


def test_number_and_duration_bound_the_arrivals_whichever_is_first():
    by_time = list(arrival_times(LoadSettings(rate=10.0, duration=5.0, seed=3)))
    assert by_time == sorted(by_time)
    assert by_time[0] > 0 and by_time[-1] < 5.0
    assert len(by_time) > 20
    assert list(arrival_times(LoadSettings(rate=10.0, duration=5.0, num_requests=7, seed=3))) == by_time[:7]
    assert len(list(arrival_times(LoadSettings(rate=10.0, duration=5.0, num_requests=10**6, seed=3)))) == len(
        by_time
    )


def test_an_infinite_rate_is_all_at_once_and_a_closed_loop_has_no_times():
    assert list(arrival_times(LoadSettings(rate=math.inf, num_requests=3))) == [0.0] * 3
    with pytest.raises(ValueError, match="closed"):
        arrival_times(LoadSettings(num_requests=3))


def test_prompts_come_all_before_any_comes_again():
    prompts = own_prompts()
    texts = list(itertools.islice(prompts_in_turn(prompts, 1), 2 * len(prompts)))
    assert texts[: len(prompts)] == texts[len(prompts) :]
    assert sorted(texts[: len(prompts)]) == sorted(prompt.text for prompt in prompts)
    other = list(itertools.islice(prompts_in_turn(prompts, 2), len(prompts)))
    assert other != texts[: len(prompts)]
    assert next(prompts_in_turn([BenchPrompt("1", "chat", "hi")], 0)) == "hi"


def test_the_dropped_share_is_as_asked_and_does_not_move_the_others():
    n, share = 20_000, 0.3
    drops = list(itertools.islice(drop_points(share, 64, seed=9), n))
    dropped = [after for after in drops if after is not None]
    assert abs(len(dropped) / n - share) < 5 * math.sqrt(share * (1 - share) / n)
    assert set(dropped) == set(range(1, 33))
    more = list(itertools.islice(drop_points(0.6, 64, seed=9), n))
    assert all(after == later for after, later in zip(drops, more, strict=True) if after is not None)
    assert set(itertools.islice(drop_points(0.0, 64, seed=9), n)) == {None}
    assert set(itertools.islice(drop_points(1.0, 1, seed=9), n)) == {1}
