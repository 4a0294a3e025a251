"""Which hosts and origins are let through."""

import asyncio
from typing import Any

import pytest

from foreword.server.middleware import OriginMiddleware
from foreword.server.settings import Address, ServerSettings, host_name


def ask(
    settings: ServerSettings, method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], list[int]]:
    """Status and headers of the answer, and what was counted as refused."""
    sent: list[Any] = []
    refused: list[int] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    named = [(key.replace("_", "-").encode(), value.encode("latin-1")) for key, value in headers.items()]
    scope = {"type": "http", "method": method, "path": "/generate", "headers": named}
    middleware = OriginMiddleware(app, settings, refused.append)
    asyncio.run(middleware(scope, None, send))  # type: ignore[arg-type]
    told = {key.decode().lower(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], told, refused


LOCAL = ServerSettings("m", allowed_hosts=Address("127.0.0.1").allowed_hosts(()))


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.1", "[::1]:8000", "[::1]"],
)
def test_a_local_server_goes_by_this_machines_names(host):
    assert ask(LOCAL, host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "192.0.2.1",
     "localhost:8000:1", "[evil]", "evil@127.0.0.1", "::", "[::1].evil"],
)  # fmt: skip
def test_a_local_server_goes_by_no_other_name(host):
    status, _, refused = ask(LOCAL, host=host)
    assert (status, refused) == (403, [403])


def test_other_names_can_be_allowed():
    assert Address("0.0.0.0").allowed_hosts(()) is None
    hosts = Address("127.0.0.1").allowed_hosts(["Llm.Example:443"])
    assert ask(ServerSettings("m", allowed_hosts=hosts), host="llm.example")[0] == 200
    named = ServerSettings("m", allowed_hosts=Address("myhost").allowed_hosts(["other"]))
    assert ask(named, host="myhost:8000")[0] == 200
    assert ask(named, host="third")[0] == 403
    assert ask(ServerSettings("m", allowed_hosts=("*",)), host="third")[0] == 200


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("a:1", "a"),
        ("a", "a"),
        ("a.", "a"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("a:", "a"),
    ],
)
def test_names_without_ports(host, name):
    assert host_name(host) == name


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost:3000", "null", "http://127.0.0.1", "http://localhost", "http://[",
     "https://127.0.0.1:8000.evil.example", "file://", ""],
)  # fmt: skip
def test_pages_of_others_may_not_ask(origin):
    status, told, refused = ask(LOCAL, host="127.0.0.1:8000", origin=origin)
    assert (status, refused) == (403, [403])
    assert "access-control-allow-origin" not in told
    asked = {"host": "127.0.0.1:8000", "origin": origin, "access_control_request_method": "POST"}
    assert ask(LOCAL, "OPTIONS", **asked)[0] == 403


def test_the_servers_own_page_and_programs_may_ask():
    assert ask(LOCAL, host="127.0.0.1:8000", origin="http://127.0.0.1:8000")[0] == 200
    assert ask(ServerSettings("m"), host="llm.example", origin="https://llm.example")[0] == 200
    assert ask(LOCAL, host="127.0.0.1:8000")[0] == 200


def test_named_origins_may_ask_and_get_a_preflight():
    settings = ServerSettings("m", cors_origins=("https://chat.example",))
    asked = {"host": "x", "origin": "https://chat.example"}
    status, told, _ = ask(settings, **asked)
    assert (status, told["access-control-allow-origin"]) == (200, "https://chat.example")
    assert "Origin" in told["vary"]
    assert ask(settings, host="x", origin="https://other.example")[0] == 403
    wanted = {"access_control_request_method": "POST", "access_control_request_headers": "content-type, x-a"}
    status, told, _ = ask(
        settings, "OPTIONS", **asked, **wanted, access_control_request_private_network="true"
    )
    assert (status, told["access-control-allow-origin"]) == (204, "https://chat.example")
    assert told["access-control-allow-headers"] == "content-type, x-a"
    assert "POST" in told["access-control-allow-methods"]
    assert told["access-control-allow-private-network"] == "true"
    assert ask(ServerSettings("m", cors_origins=("*",)), **asked)[1]["access-control-allow-origin"] == "*"
