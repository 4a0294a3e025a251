"""What a drafter costs is known before the first request, and nobody notices how."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.profiles import begin_with_calls
from foreword.engine.text import Vocabulary
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from helpers.clocks import ScriptedClock
from helpers.rollout_world import VOCAB, TimedTarget

pytestmark = pytest.mark.usefixtures("whole_profiles")

CALL, LEVEL = 0.4e-3, 0.5e-3
CONFIG = SpeculationConfig.parse({"method": "ngram", "num_speculative_tokens": 3})


class Levels(Drafter):
    """Every level costs; the very first call costs much more."""

    def __init__(self, clock: ScriptedClock, fails: bool = False) -> None:
        self.clock, self.fails = clock, fails
        self.depths: list[int] = []
        self.forgotten: list[int] = []

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        if self.fails:
            raise RuntimeError("planted")
        ((ask,),) = (asks,)
        self.clock.pass_by(CALL + LEVEL * ask.max_depth + (0.0 if self.depths else 50e-3))
        self.depths.append(ask.max_depth)
        return [Draft.chain([1] * ask.max_depth, len(ask.request.tokens), ask.request.epoch)]

    def forget(self, request: DraftRequest) -> None:
        self.forgotten.append(request.request_id)


class World:
    def __init__(self, fails: bool = False) -> None:
        self.clock = ScriptedClock(tick=1e-7)
        self.drafter = Levels(self.clock, fails)
        parts = EngineParts(
            EngineConfig(kv_cache_memory_bytes=1 << 16),
            build_drafter=lambda _: self.drafter,
            clock=self.clock,
        )
        self.core = EngineCore(TimedTarget(self.clock), Vocabulary(VOCAB, frozenset()), parts)

    def begin(self, path: Path, config: SpeculationConfig = CONFIG) -> None:
        def write(to: Path, text: str) -> None:
            to.write_text(text, encoding="utf-8")

        begin_with_calls(self.core, [config], lambda _: path, write, self.clock)


def test_the_first_step_already_knows_what_levels_cost(tmp_path: Path):
    world = World()
    world.begin(tmp_path / "calls.json")
    costs = world.core.situation.costs
    assert costs.knows_calls("ngram")
    for levels in (1, 2, 3):
        assert costs.draft_seconds("ngram", levels) == pytest.approx(CALL + LEVEL * levels, rel=0.05)
    assert max(world.drafter.depths) <= 3  # never deeper than it may be asked


def test_an_engine_is_none_the_wiser(tmp_path: Path):
    world = World()
    free = world.core.cache.available_pages
    world.begin(tmp_path / "calls.json")
    core = world.core
    core.check_integrity()
    assert core.cache.available_pages == free
    assert core.cache.num_open == 0
    assert world.drafter.forgotten == [0]
    stats = core.stats()
    assert (stats.steps, stats.step_seconds, stats.acceptance, stats.prefix_queries) == (0, 0.0, {}, 0)
    assert core.situation.costs.points() == []


def test_the_next_start_asks_nobody(tmp_path: Path):
    path, first, second = tmp_path / "calls.json", World(), World()
    first.begin(path)
    second.begin(path)
    assert first.drafter.depths
    assert not second.drafter.depths
    known = [world.core.situation.costs.draft_seconds("ngram", 2) for world in (first, second)]
    assert known[0] == known[1] > 0


@pytest.mark.parametrize("text", ["", "{}", '{"calls": {"ngram": [1]}}', '{"calls": [1]}', "[]"])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, text: str):
    path, world = tmp_path / "calls.json", World()
    path.write_text(text, encoding="utf-8")
    world.begin(path)
    assert world.drafter.depths
    calls: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["calls"]
    assert list(calls) == ["ngram"]


def test_a_drafter_that_fails_keeps_no_engine_from_starting(tmp_path: Path):
    world = World(fails=True)
    world.begin(tmp_path / "calls.json")
    world.core.check_integrity()
    assert not world.core.situation.costs.knows_calls("ngram")
    assert not (tmp_path / "calls.json").exists()
