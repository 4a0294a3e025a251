"""Reasoning and its budget through a real engine with a random model, by every API and under speculation."""

import json
from itertools import product
from pathlib import Path

import pytest

from foreword import LLM, SamplingParams, StructuredOutputs
from foreword.server.settings import ServerSettings
from foreword.structured.params import Thinking
from helpers.real_server import real_server, with_context

MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_context(tiny_model, tmp_path_factory.mktemp("wide"), 2048)


@pytest.fixture(scope="module")
def server(model: Path):
    with real_server(model, ServerSettings("tiny", reasoning_parser="deepseek_r1")) as running:
        yield running


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), dtype="float32", device="cpu", backend="cpu")


SPECULATIONS = [False, {"method": "suffix", "num_speculative_tokens": 4, "fixed": True}]


@pytest.mark.parametrize(("budget", "temperature"), [*product((0, 1, 7), (0.0, 1.0))])
def test_a_budget_is_kept_exactly_and_speculation_changes_no_text(llm: LLM, budget: int, temperature: float):
    end = llm.tokenizer.encode("</think>", add_special_tokens=False, parse_special=True)
    for seed in range(4):
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=48, thinking=Thinking(budget=budget, is_open=True)
        )
        plain, drafted = (
            llm.generate(["ab ab ab ab"], params, raw=True, speculation=speculation)[0].outputs[0]
            for speculation in SPECULATIONS
        )
        assert plain.token_ids[budget : budget + len(end)] == end
        assert drafted.token_ids == plain.token_ids
        assert plain.text.partition("</think>")[2]


def test_a_form_begins_after_the_reasoning(llm: LLM):
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=60,
        structured=StructuredOutputs(json=SCHEMA),
        thinking=Thinking(budget=9, is_open=True),
    )
    texts = [
        llm.generate(["ab ab ab"], params, raw=True, speculation=one)[0].outputs[0].text
        for one in SPECULATIONS
    ]
    thought, _, answer = texts[0].partition("</think>")
    assert thought
    assert set(json.loads(answer)) == {"a"}
    assert texts[0] == texts[1]


def by_openai(http, stream: bool, speculation: bool) -> tuple[str, str]:
    asked = {"messages": MESSAGES, "max_tokens": 40, "seed": 4, "thinking_token_budget": 6, "stream": stream}
    answer = http.post("/v1/chat/completions", json=asked | {"speculation": speculation})
    if not stream:
        message = answer.json()["choices"][0]["message"]
        return message["reasoning_content"], message["content"]
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return "".join(d.get("reasoning_content", "") for d in deltas), "".join(
        d.get("content", "") for d in deltas
    )


def by_responses(http, stream: bool, speculation: bool) -> tuple[str, str]:
    asked = {
        "input": "hello",
        "max_output_tokens": 40,
        "seed": 4,
        "thinking_token_budget": 6,
        "stream": stream,
    }
    answer = http.post("/v1/responses", json=asked | {"speculation": speculation})
    last = json.loads(answer.text.split("data: ")[-1])["response"] if stream else answer.json()
    thought, said = last["output"]
    assert (thought["type"], said["type"]) == ("reasoning", "message")
    return thought["content"][0]["text"], said["content"][0]["text"]


def by_anthropic(http, stream: bool, speculation: bool) -> tuple[str, str]:
    thinking = {"type": "enabled", "budget_tokens": 6}
    asked = {"messages": MESSAGES, "max_tokens": 40, "seed": 4, "thinking": thinking, "stream": stream}
    answer = http.post("/v1/messages", json=asked | {"speculation": speculation})
    if not stream:
        thought, said = answer.json()["content"]
        return thought["thinking"], said["text"]
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return "".join(d.get("thinking", "") for d in deltas), "".join(d.get("text", "") for d in deltas)


def by_ollama(http, stream: bool, speculation: bool) -> tuple[str, str]:
    asked = {"messages": MESSAGES, "options": {"num_predict": 40, "seed": 4}, "think": True, "stream": stream}
    lines = http.post("/api/chat", json=asked | {"thinking_token_budget": 6, "speculation": speculation}).text
    said = [json.loads(line)["message"] for line in lines.splitlines()]
    return "".join(m.get("thinking", "") for m in said), "".join(m["content"] for m in said)


def test_every_api_has_the_same_reasoning_and_text(server):
    found = {}
    with server.http() as http:
        for route, stream, speculation in product(
            (by_openai, by_anthropic, by_ollama), (True, False), (True, False)
        ):
            found[route.__name__, stream, speculation] = route(http, stream, speculation)
        for stream in (True, False):
            found["by_responses", stream, True] = by_responses(http, stream, True)
    assert len(set(found.values())) == 1, found
    thought, said = found["by_openai", True, True]
    assert thought
    assert said
    assert "think>" not in thought + said


def test_reasoning_that_is_cut_is_the_only_item_of_a_response(server):
    with server.http() as http:
        body = {"input": "hello", "max_output_tokens": 4}
        whole = http.post("/v1/responses", json=body).json()
        streamed = http.post("/v1/responses", json=body | {"stream": True}).text.splitlines()
    last = json.loads(next(line for line in reversed(streamed) if line.startswith("data: {"))[6:])["response"]
    assert [item["type"] for item in whole["output"]] == ["reasoning"]
    assert [item["type"] for item in last["output"]] == ["reasoning"]


def test_only_the_last_item_of_a_response_is_incomplete(server):
    with server.http() as http:
        body = {"input": "hello", "max_output_tokens": 40, "thinking_token_budget": 6, "seed": 4}
        whole = http.post("/v1/responses", json=body).json()
        streamed = http.post("/v1/responses", json=body | {"stream": True}).text.split("data: ")
    for answer in (whole, json.loads(streamed[-1])["response"]):
        assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_forced_call_comes_after_the_reasoning(server):
    tools = [{"type": "function", "function": {"name": "flip", "parameters": SCHEMA}}]
    asked = {"messages": MESSAGES, "max_tokens": 120, "seed": 4, "tools": tools, "tool_choice": "required"}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=asked | {"thinking_token_budget": 5}).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["tool_calls"][0]["function"]["name"] == "flip"


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (
            "/v1/chat/completions",
            {"thinking_token_budget": 4},
            "thinking_token_budget: this server was started without",
        ),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 4}},
            "thinking.budget_tokens: this server",
        ),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": -4}}, "thinking.budget_tokens: "),
        ("/v1/chat/completions", {"thinking_token_budget": "few"}, "thinking_token_budget: "),
    ],
)
def test_a_budget_needs_a_parser(model, tmp_path, path: str, fields, words: str):
    with real_server(model, ServerSettings("tiny")) as plain, plain.http() as http:
        answer = http.post(path, json={"messages": MESSAGES, "max_tokens": 9} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(words)
