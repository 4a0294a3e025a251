"""`foreword serve` with the real engine: streaming equals not streaming equals the library."""

import random
from collections import Counter

import openai
import pytest

from foreword.engine.llm import LLM
from helpers.serve_process import ServeProcess, idle_health, serve
from helpers.served_cases import Case, Outcome, draw_case, library_outcomes
from helpers.served_clients import ask_all

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "fixed": true}'


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    policy = tmp_path_factory.mktemp("policy") / "policy.json"  # guesses however much they cost others here
    policy.write_text('{"version": 1, "defaults": {"max_draft_share": 1e9}}', encoding="utf-8")
    options = ["--speculative-config", NGRAM, "--speculation-policy", str(policy)]
    with serve(tiny_model, *options, "--served-model-name", "tiny", factory=None) as running:
        yield running


def assert_all_alike(server: ServeProcess, cases: list[Case], expected: list[Outcome], at_once: int) -> None:
    for case, alone, (streamed, whole) in zip(
        cases, expected, ask_all(server.url, cases, at_once), strict=True
    ):
        assert whole == alone, case
        assert streamed == alone, case


def test_many_requests_get_the_librarys_answers(server, tiny_model):
    rng = random.Random(7)
    cases = [draw_case(rng) for _ in range(70)]
    expected = library_outcomes(LLM(str(tiny_model)), cases)
    endings = Counter(answer.finish_reason for outcome in expected for answer in outcome.answers)
    assert endings["stop"] > 10
    assert endings["length"] > 10
    assert_all_alike(server, cases, expected, at_once=16)
    with server.http() as http:
        speculation = idle_health(http)["speculation"]
    assert speculation["accepted"] > 20
    assert {"ngram", "suffix"} <= {cohort.split("/")[0] for cohort in speculation["cohorts"]}


@pytest.mark.slow
def test_five_hundred_longer_requests_get_the_librarys_answers(server, tiny_model):
    rng = random.Random(8)
    cases = [draw_case(rng, tokens=100) for _ in range(500)]
    assert_all_alike(server, cases, library_outcomes(LLM(str(tiny_model)), cases), at_once=48)


@pytest.mark.parametrize(
    ("chat", "arguments"),
    [
        (False, {"best_of": 2}),
        (False, {"suffix": "end"}),
        (True, {"modalities": ["audio"]}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(server, chat, arguments):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    with pytest.raises(openai.BadRequestError) as refusal:
        if chat:
            messages = [{"role": "user", "content": "x"}]
            client.chat.completions.create(model="tiny", messages=messages, **arguments)
        else:
            client.completions.create(model="tiny", prompt="x", **arguments)
    assert refusal.value.param == next(iter(arguments))


@pytest.mark.model
def test_the_default_model_over_openais_client_equals_the_library(default_model):
    rng = random.Random(9)
    cases = [draw_case(rng, tokens=16) for _ in range(8)]
    expected = library_outcomes(LLM("smollm2-135m"), cases)
    with serve(
        "smollm2-135m", "--speculative-config", NGRAM, "--served-model-name", "tiny", factory=None
    ) as running:
        assert_all_alike(running, cases, expected, at_once=8)
        assert running.terminate() == 0


def test_a_server_ends_without_a_word_of_complaint(tiny_model, capfd):
    with serve(tiny_model, factory=None) as running, running.http() as http:
        assert http.post("/generate", json={"prompt": "x", "max_tokens": 5}).status_code == 200
        assert running.terminate() == 0
    told = [line for line in capfd.readouterr().err.splitlines() if line]
    assert [line for line in told if not line.startswith(("loading", "INFO"))] == []
