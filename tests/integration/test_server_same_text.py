"""The same conversation has the same text by every API, streamed or not, with speculation and without."""

import json
from itertools import product
from pathlib import Path

import pytest

from foreword.server.settings import ServerSettings
from helpers.local_server import LocalServer
from helpers.real_server import real_server, with_context

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    model = with_context(tiny_model, tmp_path_factory.mktemp("wide"), 2048)
    with real_server(model, ServerSettings("tiny")) as running:
        yield running


def by_openai(http, asked, stream: bool) -> str:
    call = {"id": "c1", "type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "größer ☃"},
    ]
    tools = [{"type": "function", "function": FUNCTION}]
    body = asked | {"max_tokens": 40, "messages": messages, "tools": tools, "stop": ["zq"], "stream": stream}
    answer = http.post("/v1/chat/completions", json=body)
    if not stream:
        return answer.json()["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


def by_anthropic(http, asked, stream: bool) -> str:
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": CALL["arguments"]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "größer ☃"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = asked | {"max_tokens": 40, "system": "be kind", "messages": messages, "tools": tools,
                    "stop_sequences": ["zq"], "stream": stream}  # fmt: skip
    answer = http.post("/v1/messages", json=body)
    if not stream:
        return "".join(block["text"] for block in answer.json()["content"])
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


def by_ollama(http, asked, stream: bool) -> str:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
        {"role": "tool", "tool_name": "weather", "content": "größer ☃"},
    ]
    options = {name: asked[name] for name in ("seed", "temperature")} | {"num_predict": 40, "stop": "zq"}
    body = {"model": "tiny", "messages": messages, "options": options, "stream": stream,
            "tools": [{"type": "function", "function": FUNCTION}], "speculation": asked["speculation"]}  # fmt: skip
    lines = http.post("/api/chat", json=body).text.splitlines()
    return "".join(json.loads(line)["message"]["content"] for line in lines)


@pytest.mark.parametrize(("seed", "temperature"), [(1, 0.0), (2, 1.0), (3, 0.7)])
def test_every_route_has_the_same_text(server: LocalServer, seed: int, temperature: float):
    texts = {}
    with server.http() as http:
        for route, speculation, stream in product(
            (by_openai, by_anthropic, by_ollama), (True, False), (True, False)
        ):
            asked = {"model": "tiny", "seed": seed, "temperature": temperature, "speculation": speculation}
            texts[route.__name__, speculation, stream] = route(http, asked, stream)
    assert len(set(texts.values())) == 1, texts
    assert len(next(iter(texts.values()))) > 10
