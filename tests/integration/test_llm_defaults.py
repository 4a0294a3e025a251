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
def test_by_default_the_text_is_the_plain_one_however_much_is_guessed(tiny_model: Path):
    llm = LLM(str(tiny_model), device="cpu", backend="cpu")
    plain = LLM(str(tiny_model), device="cpu", backend="cpu", speculation="off")
    prompts = ["the the the the", "a a a a"]
    expected = plain.generate(prompts, LONG)
    for found in (llm.generate(prompts, LONG), [llm.generate(prompt, LONG)[0] for prompt in prompts]):
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert sum(output.outputs[0].stats.asks for output in expected if output.outputs[0].stats) == 0


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
