"""`foreword bench control` on a tiny model."""

from pathlib import Path

import pytest

from foreword.bench.control.timeline import EngineLine, Phase
from foreword.bench.control.windows import ControlArm, EngineStation, Prompts
from foreword.engine.config import EngineConfig
from foreword.engine.llm import LLM
from foreword.errors import RequestError
from helpers.clocks import ScriptedClock

PROMPTS = Prompts({"one": [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]], "other": [[1, 2, 3]]})
GUESSING = ControlArm("ngram", {"method": "ngram", "prompt_lookup_min": 1, "fixed": True})


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu", speculation=None)


def test_a_window_is_a_full_batch_after_its_prompts(llm: LLM):
    station = EngineStation(llm.engine, PROMPTS, 6, ScriptedClock(tick=0.5))
    plain = station.window(ControlArm("plain", False), "one", 3, 0)
    assert plain.tokens == 3 * 6
    assert plain.seconds == 0.5
    assert station.window(GUESSING, "one", 2, 1).tokens >= 2 * 6, "as much work as without guesses"
    assert not llm.engine.has_requests
    with pytest.raises(RequestError, match="before all 2 prompts"):
        EngineStation(llm.engine, PROMPTS, 1, ahead=0).window(GUESSING, "one", 2, 1)
    assert not llm.engine.has_requests


def test_prompts_that_are_read_in_chunks_do_not_end_the_answers_of_others(tiny_model: Path):
    """The first has gained more than a window's tokens before the last prompt is read."""
    config = EngineConfig(max_num_batched_tokens=6)
    slow = LLM(
        str(tiny_model), dtype="float32", device="cpu", backend="cpu", speculation=None, config=config
    ).engine
    station = EngineStation(slow, PROMPTS, 2, ScriptedClock(tick=0.5))
    window = station.window(ControlArm("plain", False), "one", 5, 0)
    assert window.tokens == 5 * 2


def test_a_line_of_phases_keeps_its_batch_full(llm: LLM):
    line = EngineLine(llm.engine, PROMPTS, ScriptedClock(tick=0.01))
    half = ControlArm(GUESSING.label, GUESSING.setting, is_half=True)
    steady, more = line.run(half, [Phase("one", 1, 0.5), Phase("other", 4, 0.5)])
    assert sum(step.tokens for step in more) > sum(step.tokens for step in steady) > 0
    # Half of them, as soon as prompts are read; steps that read some do not count.
    assert {len(step.plain_seconds) for step in more[1:]} - {0} == {2}
    assert not llm.engine.has_requests
