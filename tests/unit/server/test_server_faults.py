"""Things that go wrong at the server's edges cost as little as they can."""

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from foreword.engine.messages import NewRequest
from foreword.errors import RequestError
from foreword.server.api.bodies import read_body
from foreword.server.errors import ApiError, install_error_handlers
from foreword.server.middleware import AuthMiddleware
from foreword.server.settings import Limits, ServerSettings
from foreword.wire import frames as wire
from foreword.wire import process
from foreword.wire.process import EngineHost
from foreword.wire.supervisor import EngineStartError, Supervisor, SupervisorSettings


@pytest.mark.parametrize("key", ["plain", "schlüssel", "ключ"])
def test_a_key_may_have_any_characters(key: str):
    settings = ServerSettings("m", api_keys=(key,))
    auth = AuthMiddleware(None, settings, lambda _: None)  # type: ignore[arg-type]
    sent = [(b"authorization", f"Bearer {key}".encode())]
    assert auth._refusal({"type": "http", "path": "/v1/models", "headers": sent}) is None
    wrong = [(b"authorization", f"Bearer {key}x".encode())]
    refused = auth._refusal({"type": "http", "path": "/v1/models", "headers": wrong})
    assert refused is not None
    assert refused.status == 401


@pytest.mark.parametrize(
    ("path", "shape"),
    [("/v1/messages", {"type", "error"}), ("/api/tags", {"error"}), ("/v1/models", {"error"})],
)
def test_a_missing_key_is_refused_in_the_shape_of_the_routes_api(path: str, shape: set[str]):
    app = AuthMiddleware(None, ServerSettings("m", api_keys=("k",)), lambda _: None)  # type: ignore[arg-type]
    answer = TestClient(app).get(path)
    assert answer.status_code == 401
    assert set(answer.json()) == shape
    assert isinstance(answer.json()["error"], str) == path.startswith("/api")


def test_an_unexpected_error_is_answered_and_does_not_reach_the_web_server():
    app, seen = FastAPI(), []
    install_error_handlers(app, seen.append)

    @app.get("/broken")
    async def broken() -> None:
        raise KeyError("of the server's own")

    client = TestClient(app)  # raises what the application raises
    assert client.get("/broken").json()["error"]["type"] == "server_error"
    assert client.get("/nowhere").status_code == 404
    assert seen == [500, 404]


def test_a_body_that_declares_far_too_many_bytes_is_refused_before_it_comes():
    async def never() -> Any:
        raise AssertionError("the body was read")

    request = Request({"type": "http", "headers": [(b"content-length", b"1" + b"0" * 15)]}, never)
    with pytest.raises(ApiError, match="longer than") as refused:
        asyncio.run(read_body(request, Limits()))
    assert refused.value.status == 413


def test_a_request_that_the_engine_stumbles_over_is_refused_alone():
    sent: list[Any] = []

    class Channel:
        send = staticmethod(sent.append)

    class Stumbling:
        def submit(self, request: NewRequest) -> None:
            raise OverflowError("a number out of the blue")

    async def submit() -> EngineHost:
        host = EngineHost(Channel(), Stumbling())  # type: ignore[arg-type]
        host._submit(NewRequest("r", (1,)))
        return host

    host = asyncio.run(submit())
    assert isinstance(sent[0], wire.Refused)
    assert "out of the blue" in sent[0].error
    assert host.exit_code == 0


def test_an_engine_process_that_cannot_be_made_is_said_so(monkeypatch: pytest.MonkeyPatch):
    async def no_process(*_args: object, **_options: object) -> None:
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)

    async def start() -> None:
        start = wire.Start("model", "auto", "cpu", "auto", None, {})
        await asyncio.wait_for(Supervisor(SupervisorSettings(start)).start(), 10)

    with pytest.raises(EngineStartError, match="no more processes"):
        asyncio.run(start())


@pytest.mark.parametrize(("error", "lines"), [(RequestError("there is no model"), 0), (OSError("a bug"), 1)])
def test_an_engine_that_cannot_start_says_so_once(monkeypatch, caplog, error: Exception, lines: int):
    """Who reads the channel tells it; the log has what nobody expected."""
    sent: list[Any] = []

    class Channel:
        send = staticmethod(sent.append)

        async def flush(self) -> None: ...

    def refuse(start: wire.Start, _: object) -> None:
        raise error

    monkeypatch.setattr(process, "find_factory", lambda name: refuse)
    start = wire.Start("model", "auto", "cpu", "auto", None, {})
    assert asyncio.run(process._load_and_serve(Channel(), None, "any", start)) == 1  # type: ignore[arg-type]
    assert [message.error for message in sent] == [str(error)]
    assert len(caplog.records) == lines
