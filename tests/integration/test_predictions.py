"""Predicted outputs through library and engine: the same text in fewer passes, counted as OpenAI counts."""

import asyncio
from pathlib import Path

import pytest

from foreword import LLM, Engine, SamplingParams
from foreword.engine.config import EngineConfig
from foreword.errors import RequestError

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
PROMPT = "the sky is"
ALWAYS = {"method": "prediction", "fixed": True}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    # Beside a request without guesses others guess as far as the time that steps take allows: not a matter of this.
    config = EngineConfig(max_draft_share=1e9)
    return LLM(str(tiny_model), dtype="float32", device="cpu", config=config)


@pytest.fixture(scope="module")
def answer(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids


def test_a_prediction_saves_passes_and_changes_nothing(llm: LLM, answer: list[int]):
    edited = [*answer[:20], *answer[23:40], 7, 7, *answer[40:]]
    for expected in (answer, edited):
        output = llm.generate(PROMPT, PARAMS, prediction=expected, speculation=ALWAYS)[0]
        assert output.outputs[0].token_ids == answer
        stats = output.outputs[0].stats
        assert stats is not None
        assert stats.method == "prediction"
        assert stats.passes < 25
        told = (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens)
        assert told == ((60, 0) if expected is answer else (57, 2))


def test_a_request_that_wants_no_guesses_gets_none(llm: LLM, answer: list[int]):
    output = llm.generate(PROMPT, PARAMS, prediction=answer, speculation=False)[0].outputs[0]
    assert output.stats is not None
    assert (output.token_ids, output.stats.asks) == (answer, 0)
    assert output.stats.accepted_prediction_tokens == 60  # what was expected is told anyway


def test_one_prediction_for_all_prompts_or_one_for_each(llm: LLM, answer: list[int]):
    text = llm.generate(PROMPT, PARAMS)[0].outputs[0].text
    both = llm.generate([PROMPT, "a"], PARAMS, prediction=[text, None], speculation=[ALWAYS, None])
    assert [output.outputs[0].stats.method for output in both if output.outputs[0].stats] == [
        "prediction",
        "",
    ]
    both = llm.generate([PROMPT, "a"], PARAMS, prediction=answer, speculation=ALWAYS)
    assert [output.outputs[0].stats.asks > 0 for output in both if output.outputs[0].stats] == [True, True]
    with pytest.raises(RequestError, match="2 prompts need one for all or a list of 2 predictions, not of 3"):
        llm.generate(["a", "b"], PARAMS, prediction=["a", "b", "c"])
    with pytest.raises(RequestError, match="999999 in the prediction"):
        llm.generate("a", PARAMS, prediction=[999_999])
    with pytest.raises(RequestError, match="whole numbers"):
        llm.generate("a", PARAMS, prediction=[[1.5]])  # type: ignore[list-item]
    assert not llm.engine.has_requests


def test_the_engine_takes_predictions_too(tiny_model: Path, answer: list[int]):
    engine = Engine.load(str(tiny_model), dtype="float32", device="cpu")

    async def run() -> list[int]:
        async for output in engine.generate(PROMPT, PARAMS, prediction=answer, speculation=ALWAYS):
            last = output
        stats = last.outputs[0].stats
        assert stats is not None
        assert stats.accepted > 40
        return last.outputs[0].token_ids

    try:
        assert asyncio.run(run()) == answer
    finally:
        engine.close()
