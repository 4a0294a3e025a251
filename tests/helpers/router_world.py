"""A router in front of targets that do as they are told: no socket, no time."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2

from foreword.server.admission import Admission
from foreword.server.router.app import create_router_app
from foreword.server.router.relay import Relay, RouterMetrics
from foreword.server.router.targets import RoutedTarget, Targets
from foreword.server.settings import Limits, ServerSettings

Answer = Callable[[httpx2.Request], httpx2.Response]


class Parts(httpx2.AsyncByteStream):
    """A body that comes in parts, and may break off."""

    def __init__(self, *parts: bytes | Exception) -> None:
        self._parts = parts
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part

    async def aclose(self) -> None:
        self.closed = True


def said(status: int, value: object, **headers: str) -> httpx2.Response:
    return httpx2.Response(status, headers=headers, stream=Parts(json.dumps(value).encode()))


def stream(*parts: bytes | Exception) -> httpx2.Response:
    return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Parts(*parts))


class Fleet:
    """Targets a, b, ... and the router before them."""

    def __init__(self, *names: str, keys: tuple[str, ...] = (), access_log: bool = False) -> None:
        self.targets = Targets(",".join(f"{name}:1" for name in names))
        self.asked: list[str] = []
        self.seen: list[httpx2.Request] = []
        self.answers: dict[str, Answer] = {}
        self.client = httpx2.AsyncClient(transport=httpx2.MockTransport(self._answer))
        self.metrics = RouterMetrics()
        self.admission = Admission(Limits(running=8, queued=0))
        settings = ServerSettings("", api_keys=keys, access_log=access_log)
        relay = Relay(self.targets, self.client, self.admission, self.metrics)
        self.app = create_router_app(settings, self.targets, relay, self.metrics)
        for target in self.targets:
            target.mark_ready(0)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        name = request.url.host
        self.asked.append(name)
        self.seen.append(request)
        how = self.answers.get(name)
        return stream(b"data: 1\n\n", b"data: [DONE]\n\n") if how is None else how(request)

    def target(self, name: str) -> RoutedTarget:
        return next(one for one in self.targets if one.url == f"http://{name}:1")

    def counted(self) -> dict[str, float]:
        """Answers by code."""
        (metric,) = self.metrics.answers.collect()
        return {
            sample.labels["code"]: sample.value for sample in metric.samples if sample.name.endswith("_total")
        }

    async def ask(
        self, prompt: str = "hello", key: str = "", path: str = "/v1/completions", **how: Any
    ) -> "Told":
        headers = {"content-type": "application/json", **how.pop("headers", {})}
        if key:
            headers["authorization"] = f"Bearer {key}"
        body = json.dumps({"prompt": prompt}).encode()
        return await call(self.app, path, headers, body, **how)


class Told:
    """What a client gets."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.is_whole = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "a second answer began"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.parts.append(message["body"])
            self.is_whole = not message.get("more_body", False)


async def call(
    app: Any,
    path: str,
    headers: dict[str, str],
    body: bytes = b"",
    method: str = "POST",
    leaving: asyncio.Event | None = None,
) -> Told:
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "headers": [(k.encode(), v.encode()) for k, v in {"host": "localhost", **headers}.items()],
        "server": ("localhost", 1), "client": ("1.2.3.4", 5), "http_version": "1.1",
    }  # fmt: skip
    told, waiting = Told(), [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        await (leaving or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    await app(scope, receive, told.send)
    return told


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def broken() -> httpx2.ReadError:
    return httpx2.ReadError("torn")


def refusing(request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ConnectError("nobody")
