"""Verifying a draft with a mixture reads more experts: the measured curve shows it, and the controller goes by it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foreword.backends.torch import layers
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.experts import mixture, route
from foreword.backends.torch.weights import load_weights
from foreword.control.fixed import FixedPolicy
from foreword.control.policy import MeasuredPolicy
from foreword.engine.core import EngineCore
from foreword.engine.profiles import measure_profile
from foreword.engine.text import Vocabulary
from foreword.models.config import ExpertsSpec, LayerSpec, MlpSpec, ModelConfig
from foreword.speculation.protocols import Policy
from helpers.clocks import ScriptedClock
from helpers.mixed_configs import CONFIGS
from helpers.random_checkpoint import RandomCheckpoint
from helpers.traffic import Kind, PretendDrafter, Traffic, interpolated

pytestmark = pytest.mark.usefixtures("whole_profiles")

BASE = CONFIGS["experts"].layers[0].attention
READ = 1e-3
"""Seconds that it takes to read one expert; attention takes as long, and a row a twentieth."""


def shaped(mlp: MlpSpec) -> ModelConfig:
    return replace(CONFIGS["experts"], layers=(LayerSpec(BASE, mlp),))


MIXTURE = shaped(MlpSpec(0, experts=ExpertsSpec(count=16, per_token=2, size=20, normalize=True)))
DENSE = shaped(MlpSpec(40))  # as wide as the experts that a token takes


def curve_of(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """What an engine measures when it starts, by a clock that counts what is read."""
    clock = ScriptedClock()

    def counted(spec: Any, weights: Any, normed: torch.Tensor, activation: Any) -> torch.Tensor:
        clock.pass_by(READ * len(route(spec, weights, normed)[0].unique()))
        return mixture(spec, weights, normed, activation)

    class Timed(TorchDecoder):
        def forward(self, batch: Any, store: Any) -> Any:
            dense = 0 if self.config.layers[0].mlp.experts is not None else 2
            clock.pass_by(READ * (1 + dense + len(batch.token_ids) / 20))
            return super().forward(batch, store)

    monkeypatch.setattr(layers, "mixture", counted)
    weights = load_weights(RandomCheckpoint(config), torch.float32, torch.device("cpu"))
    core = EngineCore(Timed(config, weights), Vocabulary(config.vocab_size))
    return measure_profile(core, clock)


def depth_for(points: list[tuple[float, float]]) -> int:
    """How deep a drafter is asked that is right three times in four, once the controller knows it; 0: it is not."""
    drafter = PretendDrafter("head", {"code": Kind(0.75, spread=0.0, mood=0.0)}, level=READ / 50)
    curve = interpolated([(int(rows), 1e3 * seconds) for rows, seconds in points])
    traffic, policy = Traffic(curve, [drafter], 1, cohorts=("code",)), MeasuredPolicy()
    traffic.run(policy, 1500)
    (control,) = policy.options.values()
    return control.benefit.depth if control.is_on else 0


def test_a_mixture_s_drafts_are_shorter_because_more_experts_are_read(monkeypatch: pytest.MonkeyPatch):
    mixed, dense = curve_of(MIXTURE, monkeypatch), curve_of(DENSE, monkeypatch)
    assert mixed[0] == (1.0, pytest.approx(dense[0][1]))  # a single row costs the same: two experts are read
    at = {int(rows): seconds for rows, seconds in mixed}
    plain = {int(rows): seconds for rows, seconds in dense}
    assert at[4] > 1.5 * plain[4]  # rows of a draft take experts of their own,
    assert at[64] <= READ * (1 + 16 + 64 / 20 + 1e-6)  # until all are read, each once
    assert depth_for(dense) >= 6
    assert depth_for(mixed) <= depth_for(dense) - 3


QWEN3_30B = [(1, 2.89), (2, 3.46), (4, 4.07), (8, 7.54), (16, 10.2), (32, 14.42), (64, 16.1), (256, 22.0)]
"""Tokens in a pass and milliseconds, about as measured on an H200: from some 64 tokens on all experts are read."""


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_drafts_that_read_more_experts_do_not_make_a_batch_slower_than_plain(batch: int):
    """Half of the requests get fair drafts, the others poor ones; all of them pay for the experts of both."""
    kinds = {"code": Kind(0.5, spread=0.0, mood=0.0), "chat": Kind(0.1, spread=0.0, mood=0.0)}
    drafter = PretendDrafter("given", kinds, level=READ / 10)  # as fixed policies call it

    def ratio(policy: Policy) -> float:
        traffic = Traffic(interpolated(QWEN3_30B), [drafter], batch, cohorts=tuple(kinds))
        traffic.run(policy, 300 * batch)
        return traffic.run(policy, 600 * batch).ratio

    assert batch == 32 or ratio(FixedPolicy(drafter, 4, 4)) < 0.9  # of 32, all experts are read in any case
    assert ratio(MeasuredPolicy()) > 0.98
