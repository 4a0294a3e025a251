"""A server that speaks just enough HTTP and OpenAI to be asked, and misbehaves on demand."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

STREAM_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Behaviour:
    """What the server does with a request for an answer; it may be changed while it serves."""

    chunks: int = 4  # of text
    first_delay: float = 0.0  # seconds before the first of them
    delay: float = 0.0  # seconds before each of the others
    company: int = 0  # nobody is answered before so many have asked at once
    usage: bool = True
    tokens_per_chunk: int | None = None  # token ids to put into every chunk
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    events: list[str] | None = None  # the data of the stream's events, instead of an answer
    dies_after: int | None = None  # chunks after which the connection is torn
    ends_after: int | None = None  # chunks after which the stream ends as if that were all
    refuse_every: int | None = None  # every so many requests is answered 429


class FakeServer:
    """Remembers what it was asked and how many clients went away."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.left = 0  # clients that were gone before their answer was over
        self.most_at_once = 0
        self.port = 0
        self._now = 0
        self._has_company = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request of a connection; False: the connection is over."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {key.lower(): value for key, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.keys.append(headers.get("authorization"))
        if first.startswith("GET /v1/models "):
            return await _send_json(
                writer, 200, {}, {"data": [{"id": "fake"}, {"id": "other", "owned_by": "vllm"}]}
            )
        self.bodies.append(json.loads(body))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        if self.most_at_once >= self.behaviour.company:
            self._has_company.set()
        await self._has_company.wait()
        try:
            return await self._reply(writer, first.split()[1])
        except ConnectionError:
            self.left += 1
            raise
        finally:
            self._now -= 1

    async def _reply(self, writer: asyncio.StreamWriter, path: str) -> bool:
        how = self.behaviour
        if how.refuse_every and len(self.bodies) % how.refuse_every == 0:
            return await _send_json(writer, 429, {"Retry-After": "3"}, {"error": {"message": "full"}})
        if how.status != 200:
            return await _send_json(writer, how.status, how.headers, {"error": {"message": "no"}})
        writer.write(STREAM_HEAD.encode())
        for number, data in enumerate(self._events(path.endswith("/chat/completions"))):
            if number == how.dies_after:
                writer.transport.abort()
                return False
            if number == how.ends_after:
                break
            await asyncio.sleep(how.delay if number else how.first_delay)
            event = f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            if writer.transport.is_closing():
                raise ConnectionResetError
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _events(self, chat: bool) -> Iterator[str]:
        how = self.behaviour
        if how.events is not None:
            yield from how.events
            return
        for number in range(how.chunks):
            text = f" word{number}"
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            if how.tokens_per_chunk is not None:
                choice["token_ids"] = [7] * how.tokens_per_chunk
            choice["finish_reason"] = "length" if number == how.chunks - 1 else None
            yield json.dumps({"choices": [choice]})
        if how.usage:
            tokens = how.chunks * (how.tokens_per_chunk or 1)
            yield json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}})
        yield "[DONE]"


async def _send_json(
    writer: asyncio.StreamWriter, status: int, headers: dict[str, str], value: dict[str, Any]
) -> bool:
    body = json.dumps(value).encode()
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    head = f"HTTP/1.1 {status} Whatever\r\n" + "".join(f"{key}: {text}\r\n" for key, text in fields.items())
    writer.write(f"{head}\r\n".encode() + body)
    await writer.drain()
    return True


@contextmanager
def fake_server(behaviour: Behaviour | None = None) -> Iterator[FakeServer]:
    """The server on a free port, in a thread with a loop of its own."""
    server = FakeServer(behaviour or Behaviour())
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    server.port = listening.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_shut(listening), loop).result(timeout=30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=30)
        loop.close()


async def _shut(listening: asyncio.Server) -> None:
    listening.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
