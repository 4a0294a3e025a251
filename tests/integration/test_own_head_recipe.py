"""The head in docs/drafters.md is code that runs."""

import re
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.drafters.registry import drafter_kinds

DOCS = Path(__file__).parents[2] / "docs" / "drafters.md"


def recipe() -> str:
    """The first code block of its section."""
    section = DOCS.read_text(encoding="utf-8").partition("### Your own head in 60 lines")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_recipe_has_sixty_lines():
    assert sum(bool(line.strip()) for line in recipe().splitlines()) <= 60


def test_the_recipe_guesses_right_and_changes_no_text(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(recipe(), str(DOCS), "exec"), names)  # it is our own documentation
    kinds = {**drafter_kinds(), "nearest": names["KIND"]}
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
