"""Answers of prescribed forms: the same text with guesses and without, in any company, and always of that form."""

from pathlib import Path

import pytest

from foreword.engine.loader import load_model
from foreword.kernels.native import native_status
from helpers.configurations import FORMS as DRAFTERS
from helpers.configurations import Configuration, Runner, Wanted
from helpers.form_requests import check_form, draw_form_requests

ALONE = Configuration(seed=0)
TINY_DRAFTERS = tuple(
    {**form, "exit_layer": 1} if "exit_layer" in form else form for form in (*DRAFTERS, {"method": "grammar"})
)


def check(runner: Runner, asked: list[Wanted], ways: list[Configuration]) -> int:
    """Returns how many answers ended by themselves."""
    expected = runner.answers(asked, ALONE)
    by_name = {wanted.name: wanted for wanted in asked}
    for (name, _), answer in expected.items():
        check_form(answer, by_name[name])
    for how in ways:
        found = runner.answers(asked, how)
        wrong = {key: (answer, expected[key]) for key, answer in found.items() if answer != expected[key]}
        assert not wrong, f"{how} changes {len(wrong)} of {len(found)} answers: {wrong}"
    return sum(answer.finish_reason == "stop" for answer in expected.values())


@pytest.fixture(scope="module")
def tiny_runner(tiny_model: Path) -> Runner:
    if not native_status().available:
        pytest.skip("the CPU kernels are not here; on torch a near tie may fall either way")
    return Runner(load_model(str(tiny_model), device="cpu", backend="cpu", dtype="float32"))


def test_a_random_model_writes_nothing_but_the_form(tiny_runner: Runner):
    ways = [
        Configuration(
            seed,
            max_running=running,
            max_rows=rows,
            forms=TINY_DRAFTERS,
            max_depth=depth,
            prefix_caching=True,
            preempt_share=0.1,
            measured=measured,
        )
        for seed, running, rows, depth, measured in ((1, 6, 60, 6, False), (2, 3, 200, 20, True))
    ]
    stopped = check(tiny_runner, draw_form_requests(27, tiny_runner.encode, 48), ways)
    assert stopped >= 15
    assert tiny_runner.accepted > 100
    assert tiny_runner.preemptions > 5


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_200_schema_prompts_on_the_default_model(default_model: Path, first: int):
    runner = Runner(load_model(str(default_model), device="cpu", backend="cpu"))
    asked = draw_form_requests(200, runner.encode, 48, seed=1)[first : first + 25]
    ways = [
        Configuration(first, max_running=8, forms=({"method": "grammar"},), max_depth=16),
        Configuration(
            first + 1,
            max_running=7,
            max_rows=64,
            forms=(*DRAFTERS, {"method": "grammar"}),
            max_depth=6,
            prefix_caching=True,
            preempt_share=0.02,
            measured=True,
        ),
        Configuration.draw(500 + first),
    ]
    assert check(runner, asked, ways) >= 10
