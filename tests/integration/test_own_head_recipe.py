"""The package in examples/own_head works: it has draft tokens accepted and changes no text."""

import runpy
from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.drafters.registry import drafter_kinds

HEAD = Path(__file__).parents[2] / "examples" / "own_head" / "nearest.py"


def test_the_recipe_is_short():
    assert sum(bool(line.strip()) for line in HEAD.read_text(encoding="utf-8").splitlines()) <= 70


def test_the_recipe_guesses_right_and_changes_no_text(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    kinds = {**drafter_kinds(), "nearest": runpy.run_path(str(HEAD))["KIND"]}
    monkeypatch.setattr("foreword.drafters.config.drafter_kinds", lambda: kinds)
    llm = LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu", speculation=None)
    prompts = [{"prompt_token_ids": [20, 21, 22, 23] * 12}, {"prompt_token_ids": list(range(30, 90))}]
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=30, seed=3, ignore_eos=True),
    ]
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    form = {"method": "nearest", "num_speculative_tokens": 4, "fixed": True}
    llm.speculate(form)
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert sum(output.timings.draft_n_accepted for output in outputs) > 0
    assert not llm.engine.drafters.fault_counts()
