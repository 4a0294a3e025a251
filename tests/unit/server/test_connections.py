"""Connections that ask nothing, or too slowly, do not stay; tested on a clock that jumps."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from foreword.server import connections
from foreword.server.connections import (
    BoundedProtocol,
    ConnectionLimiter,
    OncePerMinute,
    bounded_protocol,
    capacity,
    on_loop_error,
)
from foreword.server.settings import Limits
from helpers.virtual_time import run_in_virtual_time

LIMITS = Limits(header_seconds=10, idle_seconds=30, stall_seconds=60)
REQUEST = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.protocol: BoundedProtocol | None = None
        self.written = b""
        self.closed_at: float | None = None

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed_at is not None

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if self.closed_at is None:
            loop = asyncio.get_running_loop()
            self.closed_at = loop.time()
            assert self.protocol is not None
            loop.call_soon(self.protocol.connection_lost, None)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def hello(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


async def never(_scope: Any, _receive: Any, _send: Any) -> None:
    await asyncio.Event().wait()


def connect(app: Any, most: int = 100) -> Callable[[], FakeTransport]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_keep_alive=30)
    config.load()
    kind = bounded_protocol(LIMITS, most)
    state = uvicorn.server.ServerState()

    def make() -> FakeTransport:
        transport = FakeTransport()
        transport.protocol = kind(config=config, server_state=state, app_state={})
        transport.protocol.connection_made(transport)
        return transport

    return make


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await test()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    run_in_virtual_time(run())


def feed(transport: FakeTransport, data: bytes) -> None:
    assert transport.protocol is not None
    if data and not transport.is_closing():
        transport.protocol.data_received(data)


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n%s\r\n0\r\n\r\n"


def test_a_body_with_two_lengths_is_refused_and_its_connection_closed():
    asked = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await hello(scope, receive, send)

    async def test() -> None:
        for length in (b"Content-Length: 5\r\n", b"content-length: 0\r\n"):
            transport = connect(note)()
            feed(transport, CHUNKED % length + SMUGGLED)
            await asyncio.sleep(1)
            head, _, body = transport.written.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert b"Connection: close" in head
            assert "either Content-Length or Transfer-Encoding" in json.loads(body)["error"]["message"]
            assert transport.closed_at is not None
        assert not asked
        transport = connect(note)()
        feed(transport, CHUNKED % b"")
        await asyncio.sleep(1)
        assert transport.written.startswith(b"HTTP/1.1 200 ")

    in_virtual_time(test)


def test_what_is_no_http_is_refused_in_the_shape_of_all_errors():
    async def test() -> None:
        transport = connect(hello)()
        feed(transport, b"nonsense\r\n\r\n")
        body = transport.written.partition(b"\r\n\r\n")[2]
        assert json.loads(body)["error"]["message"] == "the request is not valid HTTP/1.1"

    in_virtual_time(test)


def test_a_body_that_turns_bad_after_its_answer_has_begun_closes_the_connection():
    async def begin(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hi", "more_body": True})
        await asyncio.Event().wait()

    async def test() -> None:
        transport = connect(begin)()
        feed(transport, (CHUNKED % b"").removesuffix(b"0\r\n\r\n"))
        await asyncio.sleep(1)
        feed(transport, b"no chunk\r\n")
        assert transport.written.count(b"HTTP/1.1") == 1
        assert transport.closed_at is not None

    in_virtual_time(test)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", REQUEST[:-1]])
def test_half_a_header_is_waited_for_so_long(sent):
    async def test() -> None:
        transport = connect(hello)()
        feed(transport, sent)
        await asyncio.sleep(100)
        assert transport.closed_at == 10

    in_virtual_time(test)


def test_a_header_that_drips_has_no_more_time():
    async def test() -> None:
        transport = connect(hello)()
        for byte in b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 100:
            feed(transport, bytes([byte]))
            await asyncio.sleep(1)
        assert transport.closed_at == 10

    in_virtual_time(test)


def test_an_answered_connection_may_be_idle_for_a_while_and_then_ask_again():
    async def test() -> None:
        transport = connect(hello)()
        for _ in range(3):
            feed(transport, REQUEST)
            await asyncio.sleep(20)
        assert transport.written.count(b"200 OK") == 3
        assert transport.closed_at is None
        await asyncio.sleep(100)
        assert transport.closed_at == 2 * 20 + 30

    in_virtual_time(test)


def test_half_a_header_after_an_answer_is_waited_for_so_long():
    async def test() -> None:
        transport = connect(hello)()
        feed(transport, REQUEST)
        await asyncio.sleep(20)
        feed(transport, REQUEST[:5])
        await asyncio.sleep(5)
        feed(transport, REQUEST[5:9])
        await asyncio.sleep(100)
        assert transport.closed_at == 30

    in_virtual_time(test)


def test_a_request_under_way_is_left_in_peace():
    async def test() -> None:
        transport = connect(never)()
        feed(transport, REQUEST)
        await asyncio.sleep(1000)
        assert transport.closed_at is None

    in_virtual_time(test)


def test_a_client_that_does_not_read_is_left():
    async def test() -> None:
        transport = connect(never)()
        feed(transport, REQUEST)
        protocol = transport.protocol
        assert protocol is not None
        protocol.pause_writing()
        await asyncio.sleep(59)
        protocol.resume_writing()
        protocol.pause_writing()
        await asyncio.sleep(100)
        assert transport.closed_at == 59 + 60

    in_virtual_time(test)


def test_a_new_connection_displaces_the_one_that_has_asked_nothing_for_longest():
    async def test() -> None:
        make = connect(never, most=3)
        busy, first, second = make(), make(), make()
        feed(busy, REQUEST)
        feed(first, REQUEST[:5])
        third = make()
        assert (first.closed_at, second.closed_at, third.closed_at) == (0, None, None)
        feed(second, REQUEST)
        feed(third, REQUEST)
        await asyncio.sleep(0)
        fourth = make()
        assert fourth.written.startswith(b"HTTP/1.1 503 ")
        assert fourth.closed_at == 0
        assert not any(t.is_closing() for t in (busy, second, third))

    in_virtual_time(test)


def test_places_are_given_back():
    class Connection:
        def abort(self) -> None:
            raise AssertionError("nobody needs to go")

    limiter = ConnectionLimiter(2)
    for _ in range(5):
        one, two = Connection(), Connection()
        assert limiter.add(one)
        assert limiter.add(two)
        limiter.mark_busy(one)
        limiter.remove(one)
        limiter.mark_busy(two)
        limiter.mark_idle(two)
        limiter.remove(two)
        limiter.mark_idle(two)  # an answer that ends after its connection
        limiter.mark_busy(two)


@pytest.mark.parametrize(("files", "most"), [(1 << 20, 1024), (1024, 832), (128, 48), (16, 4)])
def test_connections_leave_files_for_the_rest(files, most, monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (files, files))
    fitting, at_once = capacity(Limits())
    assert fitting == most
    assert fitting + 4 * at_once < files


def test_a_line_is_written_once_a_minute(caplog):
    now = [0.0]
    logger = logging.getLogger("test.quiet")
    logger.addFilter(OncePerMinute(lambda: now[0]))
    with caplog.at_level(logging.WARNING, logger="test.quiet"):
        for second in range(130):
            now[0] = float(second)
            logger.warning("full: %d", second)
        logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == [
        "full: 0",
        "full: 60 (59 more like this since the last such line)",
        "full: 120 (59 more like this since the last such line)",
        "something else",
    ]


def test_a_failure_to_accept_is_a_line_and_other_failures_are_not_hidden(caplog):
    seen: list[dict[str, Any]] = []

    class Loop:
        default_exception_handler = staticmethod(seen.append)

    loop: Any = Loop()
    on_loop_error(
        loop, {"message": "socket.accept() out of system resource", "exception": OSError(24, "many")}
    )
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)]
    on_loop_error(loop, {"message": "something", "exception": OSError(24, "many")})
    assert len(seen) == 1
