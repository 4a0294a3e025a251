"""Ids of requests and the access log."""

import asyncio
import logging
from typing import Any

import pytest

from foreword.server.middleware import RequestLogMiddleware
from foreword.server.settings import ServerSettings


def ask(logs: bool = True, fails: bool = False, **headers: str) -> tuple[str, str]:
    """The id in the request's state and the one in the answer."""
    sent: list[Any] = []
    seen: dict[str, Any] = {}

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        seen.update(scope["state"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"12345"})
        if fails:
            raise RuntimeError("late")

    async def send(message: Any) -> None:
        sent.append(message)

    named = [(key.replace("_", "-").encode(), value.encode("latin-1")) for key, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": "/a b\n", "query_string": b"key=x", "headers": named}
    middleware = RequestLogMiddleware(app, ServerSettings("m", access_log=logs))
    asyncio.run(middleware(scope, None, send))  # type: ignore[arg-type]
    (told,) = [value.decode() for key, value in sent[0]["headers"] if key.lower() == b"x-request-id"]
    return seen["request_id"], told


def test_a_given_id_is_echoed_and_a_missing_one_made():
    assert ask(x_request_id="abc-1.2:3") == ("abc-1.2:3",) * 2
    first, second = ask(), ask()
    assert first[0] == first[1] != second[0]


@pytest.mark.parametrize("given", ["", "a b", "a\nINFO fake", "x" * 129, "é"])
def test_an_id_that_could_forge_a_line_is_replaced(given):
    made, told = ask(x_request_id=given)
    assert made == told != given
    assert made.startswith("req-")


def test_a_line_for_every_request_if_wanted(caplog):
    with caplog.at_level(logging.INFO, logger="foreword.access"):
        ask(logs=False)
        assert not caplog.records
        ask(x_request_id="mine")
        with pytest.raises(RuntimeError):
            ask(fails=True)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("- GET /a%20b%0A 200 5 bytes ")
    assert first.endswith(" ms mine")
    assert "key" not in first
    assert " 200 5 bytes " in second
