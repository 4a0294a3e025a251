"""The server's own routes and manners: leaving clients, keys, health, tokens."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import httpx
import openai
import pytest

from foreword import __version__
from foreword.drafters.config import SpeculationConfig
from foreword.server.settings import ServerSettings, tenant_of
from foreword.wire.supervisor import EngineState
from helpers.fake_engine import FakeEngine
from helpers.local_server import local_server
from helpers.waiting import wait_until

JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tiny_model):
    with local_server(tiny_model, ServerSettings("tiny"), FakeEngine()) as running:
        yield running


def test_models(server):
    client = server.openai()
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "foreword")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(tiny_model, stream):
    with local_server(tiny_model, ServerSettings("tiny"), FakeEngine(step_seconds=0.05)) as server:
        with server.http() as http:
            body = {"prompt": "x", "max_tokens": 400, "stream": stream}
            if stream:
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    next(answer.iter_bytes())
            else:
                leaving = HTTPConnection(http.base_url.host, http.base_url.port or 80)
                leaving.request("POST", "/v1/completions", json.dumps(body), JSON)
                wait_until(lambda: server.engine.passes)
                leaving.close()
            before = http.get("/health").json()["speculation"]["drafts"]
        wait_until(lambda: server.engine.aborted)
        wait_until(lambda: server.context.admission.in_flight == 0)
        assert server.engine.stats().running == 0
        with server.http() as http:
            told = http.get("/health").json()["speculation"]
            page = http.get("/metrics").text
        assert told["drafts"] >= max(before, 1)
        for count in ("drafts", "drafted", "accepted", "passes"):
            assert told[count] == sum(cohort[count] for cohort in told["cohorts"].values())
        assert 'finished_reason="abort",model_name="tiny"} 1.0' in page
        assert (
            f'num_drafts_total{{cohort="ngram/greedy",method="ngram",model_name="tiny"}} {told["drafts"]}.0'
            in page
        )


def test_keys_and_tenants(tiny_model):
    settings = ServerSettings("tiny", api_keys=("first", "second"))
    with local_server(tiny_model, settings, FakeEngine()) as server:
        for key in ("first", "second"):
            server.openai(key).completions.create(model="tiny", prompt="x", max_tokens=1)
            assert server.engine.requests[-1].tenant == tenant_of(key)
            assert key not in server.engine.requests[-1].tenant
        assert tenant_of("first") != tenant_of("second")
        for key in ("third", "firs", "FIRST", "first,second"):
            with pytest.raises(openai.AuthenticationError):
                server.openai(key).models.list()
        with server.http() as http:
            for route in ("/v1/models", "/metrics", "/openapi.json", "/nothing", "/tokenize"):
                answer = http.get(route)
                assert answer.status_code == 401, route
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/ready").status_code == 200
            assert http.get("/health").json() == {"status": "ok"}
            known = http.get("/health", headers={"Authorization": "Bearer second"}).json()
            assert known["speculation"]["accepted"] >= 0


def test_a_key_may_come_as_x_api_key(tiny_model):
    settings = ServerSettings("tiny", api_keys=("first", "sécond"))
    with local_server(tiny_model, settings, FakeEngine()) as server, server.http() as http:
        body = {"prompt": "x", "max_tokens": 1}
        for headers, key in (
            ({"X-API-Key": "first"}, "first"),
            ({"x-api-key": "sécond".encode()}, "sécond"),
            ({"X-API-Key": "first", "Authorization": "Bearer unused"}, "first"),
            ({"X-API-Key": "unused", "Authorization": "Bearer first"}, "first"),
        ):
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
            assert server.engine.requests[-1].tenant == tenant_of(key)
        for headers in (
            {"X-API-Key": "third"},
            {"X-API-Key": ""},
            {"X-API-Key": "Bearer first"},
            {"Authorization": "Basic first"},
            {"Authorization": "first"},
        ):
            answer = http.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert "X-API-Key" in answer.json()["error"]["message"]


def test_head_works_where_get_does(server):
    with server.http() as http:
        for route in (
            "/health",
            "/ready",
            "/metrics",
            "/version",
            "/v1/models",
            "/v1/models/tiny",
            "/",
            "/openapi.json",
        ):
            whole, head = http.get(route), http.head(route)
            assert (head.status_code, head.content) == (200, b""), route
            assert head.headers["content-type"] == whole.headers["content-type"]
            assert "content-length" in head.headers
        assert http.head("/nothing").status_code == 404
        assert http.head("/v1/completions").status_code == 405


@pytest.mark.parametrize("api_keys", [("tenant",), ()])
def test_with_keys_only_an_admin_key_switches_for_all(tiny_model, api_keys):
    settings = ServerSettings("tiny", api_keys=api_keys, admin_keys=("root",), allow_switch=True)
    with local_server(tiny_model, settings, FakeEngine()) as server, server.http() as http:
        for key in ("tenant", "other"):
            known = {"Authorization": f"Bearer {key}"}
            refused = http.post("/speculation", json={"enabled": False}, headers=known)
            is_tenant = key in api_keys or not api_keys
            assert refused.status_code == (403 if is_tenant else 401)
            if is_tenant:
                assert refused.json()["error"]["code"] == "admin_key_required"
                assert "--admin-key" in refused.json()["error"]["message"]
                assert http.get("/speculation", headers=known).status_code != 403
        assert server.client.speculating
        admin = {"X-API-Key": "root"}
        assert http.post("/speculation", json={"enabled": False}, headers=admin).status_code == 200
        assert not server.client.speculating
        answer = http.post("/generate", json={"prompt": "x", "max_tokens": 1}, headers=admin)
        assert answer.status_code == 200
        assert server.engine.requests[-1].tenant == tenant_of("root")


def test_without_an_admin_key_no_tenant_switches_for_all(tiny_model):
    settings = ServerSettings("tiny", api_keys=("tenant",), allow_switch=True)
    with (
        local_server(tiny_model, settings, FakeEngine()) as server,
        server.http(**{"X-API-Key": "tenant"}) as http,
    ):
        assert http.post("/speculation", json={"enabled": False}).status_code == 403
        assert server.client.speculating


def test_acceptance_can_be_hidden(tiny_model):
    settings = ServerSettings("tiny", show_speculation=False)
    with local_server(tiny_model, settings, FakeEngine()) as server, server.http() as http:
        body = {"prompt": "x", "max_tokens": 4}
        for route in ("/v1/completions", "/generate"):
            answer = http.post(route, json=body).json()
            assert "speculation" not in answer
            assert "predicted_ms" in answer["timings"]
            assert not {"passes", "draft_n", "draft_n_accepted"} & set(answer["timings"])
        assert not {"speculation", "usage"} & set(http.get("/health").json())
        assert http.get("/speculation").status_code == 404
        assert http.get("/advise").status_code == 404


def test_health_names_the_servers_method_before_anything_was_answered(tiny_model):
    settings = ServerSettings("tiny", speculation=SpeculationConfig.parse({"method": ["suffix", "ngram"]}))
    with local_server(tiny_model, settings, FakeEngine()) as server, server.http() as http:
        assert http.get("/health").json()["speculation"]["method"] == "suffix+ngram"
    with local_server(tiny_model, ServerSettings("tiny"), FakeEngine()) as server, server.http() as http:
        http.post("/generate", json={"prompt": "x", "max_tokens": 4, "speculation": "ngram"})
        told = http.get("/health").json()["speculation"]
        assert (told["method"], list(told["cohorts"])) == ("", ["ngram/greedy"])


def test_the_switch_exists_only_where_it_was_asked_for(server, tiny_model):
    with server.http() as http:
        assert http.post("/speculation", json={"enabled": False}).status_code == 405  # it can only be read
    settings = ServerSettings("tiny", allow_switch=True)
    with local_server(tiny_model, settings, FakeEngine()) as other, other.http() as http:
        assert http.post("/speculation", json={"enabled": False}).json() == {"enabled": False}
        answer = http.post("/generate", json={"prompt": "x", "max_tokens": 4}).json()
        assert answer["speculation"]["drafts"] == 0
        assert answer["speculation"]["method"] == ""
        assert other.engine.requests[-1].speculation is False
        told = http.get("/health").json()["speculation"]
        assert told["enabled"] is False
        assert list(told["cohorts"]) == ["plain/greedy"]
        assert (
            http.post("/generate", json={"prompt": "x", "speculation": {"method": "magic"}}).status_code
            == 400
        )
        http.post("/speculation", json={"enabled": True})
        answer = http.post("/generate", json={"prompt": "x", "max_tokens": 4}).json()
        assert answer["speculation"]["method"] == "ngram"
        assert http.get("/health").json()["speculation"]["enabled"] is True


def test_generate_in_the_librarys_words(server):
    tokenizer = server.context.prompts.tokenizer
    with server.http() as http:
        plain = http.post(
            "/generate", json={"prompt": "hi", "max_tokens": 6, "seed": 1, "speculative": False}
        ).json()
        as_chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        assert list(server.engine.requests[-1].prompt_token_ids) == as_chat
        assert server.engine.requests[-1].speculation is False
        assert plain["speculation"]["drafts"] == 0
        assert plain["text"] == plain["outputs"][0]["text"] == tokenizer.decode(plain["token_ids"])
        guessed = http.post("/generate", json={"prompt": "hi", "max_tokens": 6, "seed": 1}).json()
        assert guessed["text"] == plain["text"]
        assert guessed["speculation"]["drafts"] > 0
        http.post("/generate", json={"prompt": "hi", "max_tokens": 1, "raw": True})
        assert list(server.engine.requests[-1].prompt_token_ids) == tokenizer.encode("hi")
        both = {"prompt": "hi", "speculative": False, "speculation": False}
        assert http.post("/generate", json=both).status_code == 400


def test_tokens_and_back(server):
    with server.http() as http:
        text = "The sky is blue.\nÄ ✓"
        found = http.post("/tokenize", json={"prompt": text}).json()
        assert found["count"] == len(found["tokens"])
        assert found["max_model_len"] == 512
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
        assert chat == server.context.prompts.tokenizer.encode_chat(MESSAGES)
        assert http.post("/tokenize", json={}).status_code == 400


def test_a_conversation_with_calls_has_the_tokens_that_the_chat_route_gives_it(server):
    function = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
    messages = [*MESSAGES, called, {"role": "tool", "tool_call_id": "1", "content": "rain"}]
    with server.http() as http:
        tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).raise_for_status()
    assert tokens == list(server.engine.requests[-1].prompt_token_ids)
    assert "Bonn" in server.context.prompts.tokenizer.decode(tokens)


def test_control_tokens_are_parsed_in_raw_text_unless_that_is_switched_off(server):
    tokenizer = server.context.prompts.tokenizer
    text = "<|im_start|>hi<|im_end|>"
    parsed, plain = tokenizer.encode(text, parse_special=True), tokenizer.encode(text)
    assert parsed != plain
    with server.http() as http:
        for fields, expected in (
            ({}, parsed),
            ({"parse_special": True}, parsed),
            ({"parse_special": False}, plain),
        ):
            assert http.post("/tokenize", json={"prompt": text} | fields).json()["tokens"] == expected
            for route, more in (("/v1/completions", {}), ("/generate", {"raw": True})):
                body = {"prompt": text, "max_tokens": 1, **more, **fields}
                assert http.post(route, json=body).status_code == 200
                assert list(server.engine.requests[-1].prompt_token_ids) == expected
        user = [{"role": "user", "content": text}]
        http.post("/generate", json={"prompt": text, "max_tokens": 1})
        assert list(server.engine.requests[-1].prompt_token_ids) == tokenizer.encode_chat(user)
        http.post("/v1/chat/completions", json={"messages": user, "max_tokens": 1})
        assert list(server.engine.requests[-1].prompt_token_ids) == tokenizer.encode_chat(user)
        assert tokenizer.encode_chat(user) != tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_special_tokens_are_added_unless_that_is_switched_off(server, monkeypatch):
    tokenizer, added = server.context.prompts.tokenizer, []
    encode = tokenizer.encode

    def noting(text: str, **options: bool) -> list[int]:
        added.append(options["add_special_tokens"])
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", noting)
    with server.http() as http:
        for wanted in (True, False):
            for route, body in (
                ("/tokenize", {"prompt": "x"}),
                ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
                ("/generate", {"prompt": "x", "raw": True, "max_tokens": 1}),
            ):
                assert http.post(route, json=body | {"add_special_tokens": wanted}).status_code == 200
    assert added == [True] * 3 + [False] * 3


def test_ids_that_are_no_tokens_are_refused(server):
    with server.http() as http:
        for tokens in ([360], [5, 100_000], [5] * 5000 + [361]):
            answer = http.post("/detokenize", json={"tokens": tokens})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tokens"
            assert str(tokens[-1]) in answer.json()["error"]["message"]
        assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_health_and_readiness_tell_the_truth(server):
    with server.http() as http:
        assert http.get("/health").json()["status"] == "ok"
        assert http.get("/ready").status_code == 200
        server.client.state = EngineState.RESTARTING
        try:
            assert http.get("/health").json()["status"] == "restarting"
            assert http.get("/ready").status_code == 503
            refused = http.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "service_unavailable_error"
        finally:
            server.client.state = EngineState.READY


def test_the_version_and_heads(server):
    with server.http() as http:
        assert http.get("/version").json() == {"version": __version__}
        for path in ("/health", "/ready"):
            answer = http.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-type"] == "application/json"


def test_every_answer_has_the_requests_id(server):
    with server.http() as http:
        body = {"prompt": "x", "max_tokens": 2}
        for more in ({}, {"stream": True}, {"n": 0}):
            answer = http.post("/v1/completions", json=body | more, headers={"X-Request-Id": "mine-1"})
            assert answer.headers["x-request-id"] == "mine-1"
        assert http.get("/nothing").headers["x-request-id"].startswith("req-")


def test_openapi_describes_the_bodies(server):
    with server.http() as http:
        found = http.get("/openapi.json").json()
    body = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert body["additionalProperties"] is False
    assert {"messages", "temperature", "speculation", "tools"} <= set(body["properties"])


def test_a_long_prompt_is_encoded_beside_the_others(server, monkeypatch):
    tokenizer, may_go_on, began = server.context.prompts.tokenizer, threading.Event(), threading.Event()
    encode = tokenizer.encode

    def slow(text: str, **options: bool) -> list[int]:
        if len(text) > 5000:
            began.set()
            assert may_go_on.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    with ThreadPoolExecutor(1) as pool, server.http() as http:
        long = pool.submit(
            httpx.post, f"{server.url}/v1/completions", json={"prompt": "a" * 6000}, timeout=60
        )
        assert began.wait(30)
        for _ in range(5):
            assert http.post("/v1/completions", json={"prompt": "short", "max_tokens": 3}).status_code == 200
        may_go_on.set()
        assert long.result().status_code == 400  # longer than the context
