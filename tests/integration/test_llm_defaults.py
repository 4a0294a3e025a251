"""What an LLM does where nobody has said: guess where it is safe, sample as the model's makers recommend."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.kernels.native import native_status

needs_kernels = pytest.mark.skipif(not native_status().available, reason="no CPU kernels here")
LONG = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@needs_kernels
def test_alone_a_request_is_guessed_for_and_beside_others_it_is_not(tiny_model: Path):
    llm = LLM(str(tiny_model), device="cpu", backend="cpu")
    plain = LLM(str(tiny_model), device="cpu", backend="cpu", speculation="off")
    alone, expected = (model.generate("the the the the", LONG)[0].outputs[0] for model in (llm, plain))
    assert alone.token_ids == expected.token_ids
    assert alone.stats is not None
    assert (alone.stats.method, alone.stats.drafted > 0) == ("suffix", True)
    assert expected.stats is not None
    assert expected.stats.asks == 0
    both = llm.generate(["the the the the", "a a a a"], LONG)
    assert both[0].outputs[0].token_ids == expected.token_ids
    assert [output.outputs[0].stats.asks for output in both if output.outputs[0].stats] == [0, 0]
    llm.speculate("off")
    off = llm.generate("the the the the", LONG)[0].outputs[0]
    assert off.stats is not None
    assert off.stats.asks == 0
    llm.speculate("auto")
    assert llm.engine.drafters.default is not None


def test_torch_guesses_only_when_asked(tiny_model: Path):
    llm = LLM(str(tiny_model), dtype="float32", device="cpu")
    assert llm.engine.drafters.default is None
    asked = LLM(str(tiny_model), dtype="float32", device="cpu", speculation={"method": "ngram"})
    assert asked.engine.drafters.default is not None


def test_a_call_without_parameters_samples_as_the_model_recommends(tiny_model: Path, tmp_path: Path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.0}), encoding="utf-8")
    llm = LLM(str(model), dtype="float32", device="cpu")
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
    greedy = llm.generate("the sky", SamplingParams(temperature=0))[0].outputs[0].text
    assert {llm.generate("the sky")[0].outputs[0].text for _ in range(3)} == {greedy}
    messages = [{"role": "user", "content": "the sky"}]
    assert llm.chat(messages)[0].outputs[0].text == greedy
    hot = replace(llm.get_default_sampling_params(), temperature=1.0, seed=1)
    assert llm.generate("the sky", hot)[0].outputs[0].text != greedy
    plain = LLM(str(model), dtype="float32", device="cpu", generation_config="none")
    assert plain.get_default_sampling_params() == SamplingParams()
