"""A policy file, its roll-outs and its probes change no text."""

import json
from pathlib import Path

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.engine.config import EngineConfig
from foreword.engine.llm import LLM
from foreword.errors import RequestError

PROMPTS = [f"one two three four one two {word}" for word in ("three", "one", "two", "six", "ten", "red")]


def policy(start: str, **changes: object) -> dict[str, object]:
    return {
        "version": 1,
        "drafters": {"look": {"method": "suffix"}, "fresh": {"method": "ngram", "prompt_lookup_min": 1}},
        "cohorts": [{"name": "all", "drafters": ["look"]}],
        "rollout": {"pair": ["fresh", "all"], "start": start, "steps": [50, 100], "min_levels": 20},
        **changes,
    }


@pytest.mark.parametrize("start", ["shadow", "verify", "canary"])
def test_texts_are_those_of_plain_decoding(tiny_model: Path, tmp_path: Path, start: str):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(policy(start)), encoding="utf-8")
    params = [SamplingParams(temperature=t, seed=5, max_tokens=40, ignore_eos=True) for t in (0, 0.8) * 3]
    plain = LLM(str(tiny_model), speculation="off")
    guided = LLM(str(tiny_model), config=EngineConfig(speculation_policy=str(path)))
    expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, params)]
    for _ in range(2):
        assert [output.outputs[0].token_ids for output in guided.generate(PROMPTS, params)] == expected
    guided.engine.use_idle_time()
    while guided.engine.has_requests:
        assert guided.engine.step() == []  # nobody is told of what is decoded again
    report = guided.engine.stats().control
    assert report is not None
    assert report.mismatches == 0
    assert {pair.cohort for pair in report.pairs} <= {"all", "all/greedy", "all/medium"}
    plain.close()
    guided.close()


def test_a_file_that_says_nonsense_is_refused_before_anything_is_answered(tiny_model: Path, tmp_path: Path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(policy("shadow", cohort=[])), encoding="utf-8")
    with pytest.raises(RequestError, match="unknown key 'cohort'"):
        LLM(str(tiny_model), config=EngineConfig(speculation_policy=str(path)))
