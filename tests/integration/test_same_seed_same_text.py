"""The same seed gives the same text, however the engine runs the request."""

from dataclasses import replace
from pathlib import Path

import pytest

from foreword.engine.loader import load_model
from foreword.kernels.native import native_status
from helpers.configurations import FORMS, Configuration, Runner, Wanted, draw_requests

pytestmark = pytest.mark.model

ALONE = Configuration(seed=0)
"""One request after the other, in large chunks, without guesses."""


@pytest.fixture(scope="module")
def runner(default_model: Path) -> Runner:
    if not native_status().available:
        pytest.skip("the CPU kernels are not here; on torch a near tie may fall either way")
    model = load_model(str(default_model), device="cpu", backend="cpu")
    return Runner(model)


def settings(runner: Runner, count: int, max_tokens: int) -> list[Wanted]:
    return draw_requests(count, runner.encode, max_tokens, seed=count)


def check(runner: Runner, asked: list[Wanted], configurations: list[Configuration]) -> None:
    expected = runner.answers(asked, ALONE)
    assert len(expected) == sum(setting.params.n for setting in asked)
    for how in configurations:
        found = runner.answers(asked, how)
        assert {setting.name for setting in asked} == {name for name, _ in found}
        wrong = {key: (answer, expected[key]) for key, answer in found.items() if answer != expected[key]}
        assert not wrong, f"{how} changes {len(wrong)} of {len(found)} answers: {wrong}"
    assert runner.accepted > 0
    assert runner.preemptions > 0


def test_a_few_requests_in_every_way(runner: Runner):
    everything = Configuration(
        1, max_running=6, max_rows=33, forms=FORMS, max_depth=5, prefix_caching=True, preempt_share=0.05
    )
    decided = replace(everything, seed=2, measured=True)
    check(runner, settings(runner, 6, 10), [everything, decided])


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_200_requests_of_32_tokens_in_8_ways_each(runner: Runner, first: int):
    """Every 25 of them are run in 8 ways of their own."""
    ways = [Configuration.draw(1000 + 8 * first + way) for way in range(8)]
    check(runner, settings(runner, 200, 32)[first : first + 25], ways)
