"""Ollama's official client against a server with a real engine and a random model."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from safetensors.torch import load_file
from starlette.testclient import TestClient

from foreword import __version__
from foreword.acceptance.params import SamplingDefaults
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.server.api.ollama import ollama_routes
from foreword.server.model_files import ModelFiles
from foreword.server.settings import Limits, ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import LocalServer, local_server
from helpers.real_server import real_server, with_context

ollama = pytest.importorskip("ollama", reason="Ollama's client is not installed: pip install '.[dev]'")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "How it is.", "parameters": SCHEMA}}
]
MESSAGES = [{"role": "user", "content": "hello"}]
OPTIONS = {"seed": 3, "num_predict": 24}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_context(tiny_model, tmp_path_factory.mktemp("wide"), 2048)


@pytest.fixture(scope="module")
def server(model: Path):
    files = ModelFiles.of(open_checkpoint(model))
    with real_server(model, ServerSettings("tiny", files, limits=Limits(stops=2))) as running:
        yield running


def client_of(server: LocalServer, **headers: str) -> "ollama.Client":
    return ollama.Client(host=server.url, headers=headers)


@pytest.fixture(scope="module")
def client(server: LocalServer):
    return client_of(server)


def chat_text(server: LocalServer, messages=MESSAGES, **fields) -> str:
    asked = {"model": "tiny", "seed": 3, "max_tokens": 24, "messages": messages} | fields
    return server.openai().chat.completions.create(**asked).choices[0].message.content


def test_a_conversation_has_the_chat_routes_answer(server, client):
    said = client.chat("tiny", MESSAGES, options=OPTIONS)
    assert said.message.content == chat_text(server)
    assert (said.model, said.done, said.done_reason, said.eval_count) == ("tiny", True, "length", 24)
    assert said.prompt_eval_count > 1
    assert said.total_duration >= said.eval_duration > 1000  # nanoseconds
    parts = list(client.chat("tiny:latest", MESSAGES, options=OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == said.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 24)


def test_a_prompt_has_the_chat_routes_answer(server, client):
    said = client.generate("tiny", "hello", system="be kind", options=OPTIONS)
    system = {"role": "system", "content": "be kind"}
    assert said.response == chat_text(server, [system, *MESSAGES])
    parts = list(client.generate("tiny", "hello", system="be kind", options=OPTIONS, stream=True))
    assert "".join(part.response for part in parts) == said.response
    assert (parts[-1].done, parts[-1].eval_count) == (True, 24)


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_are_the_chat_routes(server, client, stream: bool):
    said = client.chat(
        "tiny", MESSAGES, options={"seed": 3, "num_predict": 4}, logprobs=True, top_logprobs=2, stream=stream
    )
    parts = said if stream else [said]
    found = [score for part in parts for score in part.logprobs or []]
    asked = {"model": "tiny", "seed": 3, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    chat = server.openai().chat.completions.create(messages=MESSAGES, **asked)
    expected = chat.choices[0].logprobs.content
    assert [(one.token, one.logprob) for one in found] == [(one.token, one.logprob) for one in expected]
    assert [len(one.top_logprobs) for one in found] == [2] * 4


def test_a_raw_prompt_is_continued(server, client):
    asked = {"seed": 3, "num_predict": 8}
    said = client.generate("tiny", "hello", raw=True, options=asked)
    done = server.openai().completions.create(model="tiny", prompt="hello", max_tokens=8, seed=3)
    assert said.response == done.choices[0].text
    parts = client.generate("tiny", "hello", raw=True, options=asked, stream=True)
    assert "".join(part.response for part in parts) == said.response
    endless = client.generate(
        "tiny", "hello", raw=True, options={"seed": 3, "num_predict": -1, "stop": ["e"]}
    )
    assert endless.done_reason == "stop" or endless.eval_count > 16


def test_a_stream_is_the_default_and_has_one_object_a_line(server):
    with server.http() as http:
        answer = http.post("/api/chat", json={"model": "tiny", "messages": MESSAGES, "options": OPTIONS})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["done"] for line in answer.text.splitlines()][-2:] == [False, True]


@pytest.mark.parametrize("stream", [True, False])
def test_a_tool_is_called(server, stream: bool):
    """A random model calls nothing by itself: this is what the chat route was told to require."""
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "stream": stream,
             "parallel_tool_calls": False, "options": {"seed": 3, "num_predict": 200}}  # fmt: skip
    with server.http() as http:
        said = [json.loads(line) for line in http.post("/api/chat", json=asked).text.splitlines()]
    (call,) = [call for part in said for call in part["message"].get("tool_calls", [])]
    assert call["function"]["name"] == "weather"
    assert set(call["function"]["arguments"]) == {"name", "age"}
    assert said[-1]["done_reason"] == "stop"


def test_messages_of_tools_become_the_chat_routes(server):
    called = {"function": {"name": "weather", "arguments": {"name": "Ann", "age": 3}}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [called, called]},
        {"role": "tool", "tool_name": "weather", "content": "fine"},
        {"role": "tool", "tool_name": "weather", "content": "wet"},
    ]
    body = {"model": "tiny", "messages": messages, "tools": TOOLS, "options": OPTIONS, "stream": False}
    with server.http() as http:
        said = http.post("/api/chat", json=body).json()
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": "weather", "arguments": '{"name": "Ann", "age": 3}'},
        }
        for name in ("a", "b")
    ]
    same = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "fine"},
        {"role": "tool", "tool_call_id": "b", "content": "wet"},
    ]
    assert said["message"]["content"] == chat_text(server, same, tools=TOOLS)


def test_a_format_is_kept(client):
    said = client.chat("tiny", MESSAGES, format=SCHEMA, options={"seed": 1, "num_predict": 60})
    assert set(json.loads(said.message.content)) == {"name", "age"}
    assert client.generate("tiny", "x", format="json", options={"num_predict": 5}).response.startswith("{")


def test_models_are_listed_and_shown(server, client, model):
    assert [model.model for model in client.list().models] == ["tiny"]
    assert [model.model for model in client.ps().models] == ["tiny"]
    shown = client.show("tiny")
    (listed,), (running,) = client.list().models, client.ps().models
    files = [file.stat() for file in model.iterdir()]
    assert listed.size == running.size == sum(stat.st_size for stat in files) > 0
    assert listed.modified_at.timestamp() == pytest.approx(max(stat.st_mtime for stat in files))
    assert len(listed.digest) == 64  # Ollama's programs take its first 12 characters
    assert shown.details.format == listed.details.format == "safetensors"
    assert running.context_length == 2048
    assert shown.modelinfo["llama.context_length"] == 2048
    assert shown.details == listed.details == running.details
    assert (shown.details.family, shown.details.quantization_level) == ("llama", "F32")
    weights = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    assert shown.modelinfo["general.parameter_count"] == weights
    assert shown.details.parameter_size == f"{weights / 1000:.1f}K"
    assert {"completion", "tools"} <= set(shown.capabilities)
    with server.http() as http:
        assert http.get("/api/version").json() == {"version": __version__}
        assert http.post("/api/embed", json={}).status_code == 501
        assert http.request("DELETE", "/api/delete", json={"model": "tiny"}).status_code == 501
        assert http.post("/api/show", json={}).json() == {"error": "model: is missing"}


def test_models_have_the_fields_of_ollamas_own_server(server):
    """The shapes are those in Ollama's documentation; programs that list models read these fields."""
    with server.http() as http:
        (listed,) = http.get("/api/tags").json()["models"]
        shown = http.post("/api/show", json={"model": "tiny"}).json()
    fields = {"name": str, "model": str, "modified_at": str, "size": int, "digest": str, "details": dict}
    assert {name: type(listed[name]) for name in fields} == fields
    details = {
        "parent_model": str,
        "format": str,
        "family": str,
        "families": list,
        "parameter_size": str,
        "quantization_level": str,
    }
    assert {name: type(value) for name, value in listed["details"].items()} == details
    assert shown["details"] == listed["details"]
    of_shown = {"template": str, "parameters": str, "model_info": dict, "capabilities": list}
    assert {name: type(shown[name]) for name in of_shown} == of_shown


@pytest.mark.parametrize(("requested", "shown"), [(None, 2048), (512, 512), (4096, 2048)])
def test_the_context_is_shown_while_the_engine_starts(model, requested: int | None, shown: int):
    settings = ServerSettings("tiny", ModelFiles.of(open_checkpoint(model), requested))
    app = FastAPI()
    starting = SimpleNamespace(settings=settings, adapters={}, engine=SimpleNamespace(max_model_len=None))
    app.include_router(ollama_routes(starting))
    (running,) = TestClient(app).get("/api/ps").json()["models"]
    assert running["context_length"] == shown


def test_a_request_without_words_loads_the_model(client):
    assert client.generate("tiny", "").done_reason == "load"
    assert client.chat("tiny", []).done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="there is no model 'other'"):
        client.chat("other", [])


@pytest.mark.parametrize("route", ["/api/generate", "/api/chat"])
def test_who_loads_without_naming_the_model_is_told_its_name(server, route: str):
    with server.http() as http:
        assert http.post(route, json={}).json()["model"] == "tiny"


NO_PROMPTS = (  # invalid fields of /api/generate, and the words of their errors
    ({"prompt": ["one", "two"], "raw": True}, "prompt: must be a text"),
    ({"prompt": [5, 6], "raw": True}, "prompt: must be a text"),
    ({"prompt": ["one"]}, "prompt: must be a text"),
    ({"prompt": 0}, "prompt: must be a text"),
    ({"prompt": "hello", "raw": "false"}, "raw: must be true or false"),
)


@pytest.mark.parametrize(("fields", "words"), NO_PROMPTS)
def test_a_prompt_is_one_text_and_raw_is_a_flag(server, fields: dict, words: str):
    with server.http() as http:
        refused = http.post("/api/generate", json={"model": "tiny", **fields})
    assert (refused.status_code, refused.json()) == (400, {"error": words})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": 3}, "messages: must be a list"),
        ({"messages": ["x"]}, "messages.0: must be an object"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]},
         "messages.0.images: is not supported by this server: it takes and generates text only; send a description"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages.0.tool_calls.0: "),
        ({"options": 3}, "options: must be an object"),
        ({"options": {"temperature": 9}}, "options.temperature: "),
        ({"options": {"temperature": "hot"}}, "options.temperature: "),
        ({"options": {"num_predict": 10**6}}, "the prompt has"),
        ({"options": {"num_predict": 0}}, "options.num_predict: "),
        ({"options": {"stop": ["a", "b", "c"]}}, "options.stop: number of stops is 3"),
        ({"options": {"mirostat": 2}}, "options.mirostat: is not supported"),
        ({"format": "xml"}, 'format: must be "json"'),
        ({"format": {"type": 3}}, "format: "),
        ({"think": 3}, "think: "),
        ({"n": 2}, "n: this API has one answer"),
        ({"template": "{{ .Prompt }}"}, "template: is not supported"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_that_names_the_field(server, fields, words: str):
    body = {"model": "tiny", "messages": MESSAGES} | fields
    with server.http() as http:
        answer = http.post("/api/chat", json=body)
    assert answer.status_code == 400
    told = answer.json()["error"]
    assert told.startswith(words)
    assert "\n" not in told
    if "num_predict" in str(fields):
        assert "options.num_predict" in told


def test_options_that_are_no_sampling_are_ignored_by_name(server):
    body = {
        "model": "tiny",
        "messages": MESSAGES,
        "stream": False,
        "options": {"num_ctx": 4096, "num_predict": 2},
    }
    with server.http() as http:
        answer = http.post("/api/chat", json=body)
    assert answer.status_code == 200
    assert answer.headers["X-Foreword-Ignored-Fields"] == "options.num_ctx"


def test_options_choose_neither_the_model_nor_a_stream(server):
    options = {"model": "other", "stream": True, "num_predict": 2}
    body = {"model": "tiny", "messages": MESSAGES, "stream": False, "options": options}
    with server.http() as http:
        answer = http.post("/api/chat", json=body)
        absent = http.post("/api/chat", json=body | {"model": "absent"})
    assert answer.status_code == 200
    assert answer.json()["done"]
    assert answer.headers["X-Foreword-Ignored-Fields"] == "options.model, options.stream"
    assert "options" not in absent.json()["error"]


def test_keys_and_failures_within_a_stream(tiny_model):
    engine = FakeEngine(step_seconds=0.01)
    with local_server(tiny_model, ServerSettings("tiny", api_keys=("secret",)), engine) as server:
        with pytest.raises(ollama.ResponseError, match="give this server's API key"):
            client_of(server).chat("tiny", MESSAGES)
        stream = client_of(server, authorization="Bearer secret").chat(
            "tiny", MESSAGES, options={"num_predict": 400}, stream=True
        )
        next(stream)
        server.call(lambda: engine.abort(engine.requests[-1].request_id))
        with pytest.raises(ollama.ResponseError, match="the server stopped before the answer was finished"):
            list(stream)


def test_even_streams_have_lines_that_parse(tiny_model):
    with local_server(tiny_model, ServerSettings("tiny", stream_pacing="even"), FakeEngine()) as server:
        parts = list(client_of(server).chat("tiny", MESSAGES, options={"num_predict": 12}, stream=True))
    assert sum(part.eval_count or 0 for part in parts) == 12


@pytest.mark.parametrize("stream", [False, True])
def test_a_raw_prompt_has_log_probabilities_in_ollamas_format(server, client, stream: bool):
    asked = {
        "model": "tiny",
        "prompt": "hello",
        "raw": True,
        "options": OPTIONS,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = client.generate(**asked, stream=stream)
    found = [one for part in (answer if stream else [answer]) for one in part.logprobs or []]
    fields = {"prompt": "hello", "seed": 3, "max_tokens": 24, "logprobs": 2}
    theirs = server.openai().completions.create(model="tiny", **fields).choices[0].logprobs
    assert [one.token for one in found] == theirs.tokens
    assert [one.logprob for one in found] == theirs.token_logprobs
    assert [{top.token: top.logprob for top in one.top_logprobs} for one in found] == theirs.top_logprobs
    assert client.generate(**asked | {"logprobs": False}).logprobs is None


def test_the_recommended_parameters_are_lines_under_ollamas_names():
    sampling = SamplingDefaults({"temperature": 0.2, "repetition_penalty": 1.1})
    app = FastAPI()
    settings = ServerSettings("tiny", sampling=sampling)
    tokenizer = SimpleNamespace(chat_template="", fill=None)
    context = SimpleNamespace(
        settings=settings, check_model=lambda name: None, prompts=SimpleNamespace(tokenizer=tokenizer),
        engine=SimpleNamespace(max_model_len=8), adapters=(),
    )  # fmt: skip
    app.include_router(ollama_routes(context))
    shown = TestClient(app).post("/api/show", json={"model": "tiny"}).json()
    assert [line.split() for line in shown["parameters"].splitlines()] == [
        ["temperature", "0.2"],
        ["repeat_penalty", "1.1"],
    ]
