"""Gaps in texts: the prompt that a model sees, where the answer ends, and the same text however it is made."""

import json
from pathlib import Path

import openai
import pytest

from foreword import LLM, SamplingParams
from foreword.server.settings import ServerSettings
from helpers.command_line import assert_one_line_error, foreword
from helpers.fake_engine import FakeEngine
from helpers.fill_models import MIDDLE, PAD, PREFIX, SUFFIX, make_fill_model
from helpers.local_server import local_server

BEFORE, AFTER = "def add(first, second):\n    ", "\nthe then there these they"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "fixed": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fill_model(tmp_path_factory.mktemp("fill") / "model")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), speculation=NGRAM)


def test_the_text_is_the_same_with_and_without_speculation(llm: LLM):
    params = SamplingParams(temperature=0.3, max_tokens=24, seed=5, ignore_eos=True)
    with_drafts, plain = (
        llm.generate([BEFORE], params, suffix=AFTER, speculation=setting)[0] for setting in (None, False)
    )
    assert with_drafts.outputs[0].stats.drafted > 0
    assert with_drafts.outputs[0].token_ids == plain.outputs[0].token_ids
    assert plain.prompt_token_ids == llm.tokenizer.encode_fill(BEFORE, AFTER)
    continued = llm.generate([BEFORE], params, raw=True)[0]
    assert continued.outputs[0].token_ids != plain.outputs[0].token_ids


def test_the_answer_ends_with_a_token_that_ends_the_gap(llm: LLM):
    forced = {"temperature": 0, "max_tokens": 8, "logit_bias": {PAD: 100.0}}
    filled = llm.generate([BEFORE], SamplingParams(**forced), suffix=AFTER)[0].outputs[0]
    assert (filled.text, filled.finish_reason, len(filled.token_ids)) == ("", "stop", 1)
    on = llm.generate([BEFORE], SamplingParams(**forced, ignore_eos=True), suffix=AFTER)[0].outputs[0]
    assert (on.finish_reason, len(on.token_ids)) == ("length", 8)


@pytest.fixture(scope="module")
def server(model: Path):
    engine = FakeEngine(step_seconds=0.0005)
    engine.vocab_size = PAD + 1
    with local_server(model, ServerSettings("tiny"), engine) as running:
        yield running


def test_completions_take_a_suffix(server):
    client = server.openai()
    tokenizer = server.context.prompts.tokenizer
    client.completions.create(model="tiny", prompt=BEFORE, suffix=AFTER, max_tokens=2)
    request = server.engine.requests[-1]
    assert list(request.prompt_token_ids) == tokenizer.encode_fill(BEFORE, AFTER)
    assert {PREFIX, MIDDLE, SUFFIX, PAD} <= set(request.params.stop_token_ids)
    client.completions.create(model="tiny", prompt=[7, 8], suffix="<|fim_middle|>", max_tokens=2)
    ids = list(server.engine.requests[-1].prompt_token_ids)
    assert ids[:4] == [PREFIX, 7, 8, SUFFIX]
    assert ids.count(MIDDLE) == 1
    for nothing in ("", None):
        client.completions.create(model="tiny", prompt=BEFORE, suffix=nothing, max_tokens=2)
        assert list(server.engine.requests[-1].prompt_token_ids) == tokenizer.encode(BEFORE)
        assert server.engine.requests[-1].params.stop_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "param"), [({"suffix": "x", "echo": True}, "echo"), ({"suffix": 3}, "suffix")]
)
def test_what_makes_no_sense_with_a_suffix_is_refused(server, fields: dict, param: str):
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai().completions.create(model="tiny", prompt="x", extra_body=fields)
    assert refused.value.param == param


def test_a_model_without_such_tokens_says_so(tiny_model: Path):
    with local_server(tiny_model, ServerSettings("tiny"), FakeEngine(step_seconds=0.0005)) as running:
        with pytest.raises(openai.BadRequestError) as refused:
            running.openai().completions.create(model="tiny", prompt="x", suffix="y")
        assert refused.value.param == "suffix"
        assert "no fill-in-the-middle tokens" in refused.value.message


def test_the_command_line_fills_gaps(llm: LLM, model: Path):
    how = ["--model", str(model), "--temperature", "0", "--max-tokens", "8", "--json"]
    run = foreword("generate", "the sky", "--suffix", AFTER, *how)
    assert run.returncode == 0, run.stderr
    filled = llm.generate(["the sky"], SamplingParams(temperature=0, max_tokens=8), suffix=AFTER)[0]
    answer = json.loads(run.stdout)
    assert answer["text"] == filled.outputs[0].text
    refused = foreword("generate", "the sky", "--suffix", AFTER, "--system", "x", *how)
    assert_one_line_error(refused, "--suffix", "--system")
