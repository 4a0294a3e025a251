"""The cost of a pass: medians without the warm-up, engines in turn, prompts beside steps."""

import pytest
import torch

from foreword.bench import step_cost
from foreword.bench.random_models import RandomCheckpoint, as_mixture
from foreword.bench.step_cost import PromptCost, check_sizes, compare_step_cost
from foreword.errors import RequestError
from helpers.random_checkpoint import SMOLLM2_SHAPE


class ScriptedTimer:
    """Passes that take n milliseconds each, prompts that take 10 n; the first of each is a hundred times slower."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def step(self, n: int) -> float:
        return self._seconds(f"step {n}", n)

    def prefill(self, count: int) -> float:
        return self._seconds(f"prompt {count}", 10 * count)

    def _seconds(self, name: str, ms: float) -> float:
        self.seen.append(name)
        return 1e-3 * ms * (100 if self.seen.count(name) == 1 else 1)


def test_medians_leave_out_the_first_round(monkeypatch: pytest.MonkeyPatch):
    slept = []
    monkeypatch.setattr(step_cost, "sleep", slept.append)
    timers = {"ours": ScriptedTimer(), "theirs": ScriptedTimer()}
    told: list[tuple[int, int]] = []
    costs = compare_step_cost(
        timers, [2, 8], prompts=[128, 512], repeats=7, progress=lambda done, total: told.append((done, total))
    )
    for name in timers:
        assert [(cost.n, cost.ms, cost.ratio) for cost in costs[name].steps] == [
            (2, pytest.approx(2), 1.0),
            (8, pytest.approx(8), pytest.approx(4)),
        ]
        assert costs[name].prompts == [
            PromptCost(128, pytest.approx(1280)),
            PromptCost(512, pytest.approx(5120)),
        ]
    assert told == [(done, 16) for done in range(1, 17)]
    assert slept == [step_cost.ENGINE_PAUSE] * 16
    assert timers["ours"].seen.count("step 8") == 8
    assert timers["ours"].seen.count("prompt 512") == 6


def test_without_prompts_none_is_computed_and_a_lone_engine_needs_no_pause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(step_cost, "sleep")
    timer = ScriptedTimer()
    assert compare_step_cost({"": timer}, [1], repeats=1)[""].prompts == []
    assert timer.seen == ["step 1", "step 1"]


@pytest.mark.parametrize("prompts", [[0], [128, 513]])
def test_prompts_that_the_model_cannot_hold_are_refused(prompts: list[int]):
    check_sizes([1], 16, 1, 512, [1, 512])
    with pytest.raises(RequestError, match=r"1 \.\. 512"):
        check_sizes([1], 16, 1, 512, prompts)


def test_a_mixture_of_the_same_active_size():
    mixed = as_mixture(SMOLLM2_SHAPE, 8)
    experts = mixed.layers[0].mlp.experts
    assert experts is not None
    assert (experts.count, experts.per_token * experts.size) == (8, SMOLLM2_SHAPE.layer.mlp.intermediate_size)
    assert RandomCheckpoint(mixed).load(
        "model.layers.0.mlp.experts.7.down_proj.weight", torch.float32
    ).shape == (576, 768)
    for refused in (2, 10**6):
        with pytest.raises(RequestError, match="experts"):
            as_mixture(SMOLLM2_SHAPE, refused)
    with pytest.raises(RequestError, match="dense"):
        as_mixture(mixed, 8)
