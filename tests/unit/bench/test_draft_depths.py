"""Expected speed-up of a trained drafter, from acceptance by level and the time of passes."""

import pytest

from foreword.bench.draft_depths import DepthTimes

TIMES = DepthTimes({0: 10.0, 1: 11.0, 2: 12.0, 3: 18.0})


def test_speed_is_tokens_per_pass_by_the_time_of_a_pass():
    assert TIMES.speed_up(1.8, 2) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("acceptance", "best", "speed"),
    [
        ((0.8, 0.5, 0.5), 2, (1 + 0.8 + 0.4) * 10 / 12),  # a third one would lengthen the pass by half
        ((0.05, 0.5, 0.5), 0, 1.0),
        ((0.9, 0.9, 0.9, 0.9), 2, (1 + 0.9 + 0.81) * 10 / 12),  # the fourth depth was not measured
    ],
)
def test_the_best_depth_maximises_expected_speed(acceptance: tuple[float, ...], best: int, speed: float):
    depth, found = TIMES.best(acceptance)
    assert (depth, found) == (best, pytest.approx(speed))
