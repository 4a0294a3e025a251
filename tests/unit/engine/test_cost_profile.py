"""What is kept of a machine's costs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.control.policy import MeasuredPolicy
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.drafting.saved_estimates import SavedEstimates
from foreword.engine.profiles import _read, engine_key, restore_estimates
from foreword.engine.text import Vocabulary
from helpers.clocks import ScriptedClock
from helpers.mixed_configs import CONFIGS
from helpers.random_checkpoint import RandomCheckpoint

pytestmark = pytest.mark.usefixtures("whole_profiles")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"points": []}',
        '{"points": [[1, 0]]}',
        '{"points": [[0, 0.1]]}',
        '{"points": [[1e999, 0.1]]}',
        '{"points": [[1, 1e999]]}',
        '{"points": [[1, NaN]]}',
        f'{{"points": [[1, {10**400}]]}}',
    ],
)
def test_a_damaged_profile_is_none(tmp_path: Path, text: str):
    file = tmp_path / "profile.json"
    file.write_text(text)
    assert _read(file) is None


def test_a_profile_is_read(tmp_path: Path):
    file = tmp_path / "profile.json"
    file.write_text('{"points": [[1, 0.01], [8, 0.02]]}')
    assert _read(file) == [(1.0, 0.01), (8.0, 0.02)]


class Timed(TorchDecoder):
    """A pass takes 4 ms and 1 ms for every row, and what `busy` makes of that, by a clock of its own."""

    def __init__(self, busy: Callable[[float], float]) -> None:
        config = CONFIGS["experts"]
        super().__init__(config, load_weights(RandomCheckpoint(config), torch.float32, torch.device("cpu")))
        self.clock, self.busy, self.passes = ScriptedClock(), busy, 0

    def forward(self, batch: Any, store: Any) -> Any:
        self.passes += 1
        self.clock.pass_by(self.busy(4e-3 + 1e-3 * len(batch.token_ids)))
        return super().forward(batch, store)


def started(busy: Callable[[float], float]) -> tuple[EngineCore, Timed, MeasuredPolicy, SavedEstimates]:
    decoder, policy = Timed(busy), MeasuredPolicy()
    core = EngineCore(decoder, Vocabulary(decoder.config.vocab_size), EngineParts(EngineConfig(), policy))
    return core, decoder, policy, restore_estimates(core, policy, clock=decoder.clock)


@pytest.mark.parametrize("is_saved", [False, True], ids=["profile", "estimates"])
def test_costs_saved_on_a_busy_machine_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool
):
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path))
    _, first, policy, kept = started(lambda seconds: seconds + 0.02)  # it waits for its core
    if is_saved:
        policy.steps = 1
        kept.save()
    core, again, *_ = started(lambda seconds: seconds)
    for rows in (1, 2, 4, 8):
        assert core.situation.costs.step_seconds(rows) == pytest.approx(4e-3 + 1e-3 * rows)
    assert again.passes > first.passes, "a few passes to compare, then a profile"
    if not is_saved:
        _, third, *_ = started(lambda seconds: seconds)
        assert third.passes < first.passes, "the new profile is kept"


def test_costs_that_differ_by_one_factor_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps follow one factor at once: to measure all of it again would make every start slower."""
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path))
    _, first, *_ = started(lambda seconds: 3 * seconds)
    core, again, *_ = started(lambda seconds: seconds)
    assert again.passes < first.passes
    costs = core.situation.costs
    assert costs.step_seconds(8) / costs.step_seconds(1) == pytest.approx(12 / 5)  # type: ignore[operator]


def test_what_a_tiny_engine_has_measured_is_not_kept_for_others():
    config = CONFIGS["experts"]
    weights = load_weights(RandomCheckpoint(config), torch.float32, torch.device("cpu"))
    decoder = TorchDecoder(config, weights)

    def key(length: int | None, memory: int) -> str:
        sizes = EngineConfig(max_model_len=length, kv_cache_memory_bytes=memory)
        return engine_key(EngineCore(decoder, Vocabulary(config.vocab_size), EngineParts(sizes)))

    usual = key(None, 1 << 24)
    assert key(None, 1 << 25) == usual
    assert len({usual, key(8, 1 << 24), key(None, 1 << 15)}) == 3
