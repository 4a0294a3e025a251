"""A server of our own as a child process, and a client that costs next to nothing."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from foreword.errors import ForewordError

_READ_BYTES = 1 << 16
_STOP_SECONDS = 60


@dataclass(frozen=True)
class StreamedAnswer:
    """An answer and when it came, on the clock of perf_counter."""

    text: str
    first: float  # the first text
    last: float  # the last text


@dataclass(frozen=True)
class ServedModel:
    """A running server."""

    address: str  # host:port
    process_id: int

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor time so far of the API process and of the engine's."""
        tasks = Path(f"/proc/{self.process_id}/task/{self.process_id}/children").read_text(encoding="ascii")
        return _cpu_seconds(self.process_id), sum(_cpu_seconds(int(child)) for child in tasks.split())

    async def stream(self, body: dict[str, Any]) -> StreamedAnswer:
        """Post to /v1/completions and read the stream to its end."""
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(body | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.address}\r\nConnection: close\r\n"
        length = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(f"{head}{length}".encode() + content)
        parts: list[bytes] = []
        times: list[float] = []
        while data := await reader.read(_READ_BYTES):
            parts.append(data)
            if b"data: {" in data:
                times.append(perf_counter())
        writer.close()
        text = _text_of(b"".join(parts))
        return StreamedAnswer(text, times[0], times[-1])


def _cpu_seconds(process_id: int) -> float:
    """User and system time; the fields are counted after the name, which may hold anything."""
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _text_of(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise ForewordError(f"the server refused: {body[:300].decode(errors='replace')}")
    events = b"".join(_chunks(body)).decode().split("\n\n")
    told = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    failed = next((event["error"]["message"] for event in told if "error" in event), None)
    if failed is not None:
        raise ForewordError(f"the server failed: {failed}")
    return "".join(choice["text"] for event in told for choice in event["choices"])


def _chunks(body: bytes) -> Iterator[bytes]:
    """The contents of HTTP's chunked encoding."""
    start = 0
    while start < len(body):
        end = body.index(b"\r\n", start)
        length = int(body[start:end], 16)
        yield body[end + 2 : end + 2 + length]
        start = end + 2 + length + 2


@contextmanager
def served_model(model: str, options: Sequence[str]) -> Iterator[ServedModel]:
    """`foreword serve` on a free port of this machine, until the block ends."""
    command = [sys.executable, "-m", "foreword", "serve", model, "--port", "0", *options]
    environment = {name: value for name, value in os.environ.items() if name != "FOREWORD_API_KEY"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        url = next((word for word in line.split() if word.startswith("http://")), None)
        if url is None:
            raise ForewordError("`foreword serve` did not start; its message is above")
        yield ServedModel(urlsplit(url).netloc, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
