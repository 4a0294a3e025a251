"""Processes OpenAI batch files through the server's routes, without a port."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, TextIO

import httpx2
from fastapi import FastAPI

from foreword.errors import RequestError
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.progress import Progress, StageProgress
from foreword.server.app import create_app, create_context
from foreword.server.settings import ServerSettings
from foreword.wire.supervisor import Supervisor, SupervisorSettings

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/generate",
)
"""Routes that a batch request may name."""

_TRIES = 3
"""Attempts per request while the engine restarts."""

_FULL_OR_STARTING = (429, 503)


class LineError(RequestError):
    """A line of a batch is not a valid request."""


@dataclass(frozen=True)
class BatchRequest:
    """One line of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]

    @staticmethod
    def of(value: object) -> "BatchRequest":
        """Parse a line's JSON; raise `LineError` with the invalid field."""
        if not isinstance(value, dict):
            raise LineError("must be a JSON object with custom_id, method, url and body")
        custom_id, body = value.get("custom_id"), value.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise LineError("custom_id: must be a text that is not empty")
        if value.get("method") != "POST":
            raise LineError("method: must be POST")
        if value.get("url") not in URLS:
            raise LineError(f"url: must be one of {', '.join(URLS)}")
        if not isinstance(body, dict):
            raise LineError("body: must be an object")
        if body.get("stream"):
            raise LineError("body.stream: answers of a batch are whole; leave it out")
        return BatchRequest(custom_id, value["url"], {**body, "stream": False})


@dataclass
class Batch:
    """Unanswered requests of a file, and existing answers."""

    requests: list[BatchRequest] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)  # lines of the answer file
    refused: list[dict[str, Any]] = field(default_factory=list)  # answers to invalid lines

    @staticmethod
    def read(requests: Path, answers: Path) -> "Batch":
        """Read both files; keep earlier answers unless a retry may succeed."""
        batch, kept = Batch(), dict(_answered(answers))
        seen: set[str] = set()
        for number, line in enumerate(_lines(requests), start=1):
            try:
                request = BatchRequest.of(_json(line))
                if request.custom_id in seen:
                    raise LineError(f"custom_id: {request.custom_id[:64]!r} is that of an earlier line")
            except LineError as error:
                batch.refused.append(_failure(None, f"line {number}: {error}"))
                continue
            seen.add(request.custom_id)
            if request.custom_id not in kept:
                batch.requests.append(request)
        if other := kept.keys() - seen:
            raise RequestError(
                f"{answers} has an answer to {min(other)[:64]!r}, which is not in {requests}; name another file"
            )
        batch.answered = list(kept.values())
        return batch


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None


def _json(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise LineError("is not JSON") from None


def _answered(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (custom_id, line) of final answers in a file; a truncated line is skipped."""
    for line in _lines(path) if path.exists() else ():
        try:
            value = _json(line)
        except LineError:
            continue
        answer = value.get("response") if isinstance(value, dict) else None
        if isinstance(value, dict) and isinstance(answer, dict) and answer.get("status_code", 500) < 500:
            yield str(value.get("custom_id")), line.rstrip("\n")


def _failure(custom_id: str | None, message: str, code: str = "invalid_line") -> dict[str, Any]:
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str | None, response: object, error: object = None) -> dict[str, Any]:
    return {
        "id": f"batch_req_{token_hex(12)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


@dataclass
class BatchCounts:
    """Outcomes of a batch."""

    kept: int = 0  # answers of an earlier run
    answered: int = 0
    failed: int = 0


async def answer_all(
    app: FastAPI, batch: Batch, out: TextIO, at_once: int, on_progress: Progress
) -> BatchCounts:
    """Answer all requests, `at_once` at a time; write each answer when it is complete."""
    counts = BatchCounts(len(batch.answered))
    total = len(batch.answered) + len(batch.refused) + len(batch.requests)
    waiting = iter(batch.requests)

    def write(line: dict[str, Any]) -> None:
        response = line["response"]
        is_answer = response is not None and response["status_code"] < 400
        counts.answered += is_answer
        counts.failed += not is_answer
        out.write(json.dumps(line, ensure_ascii=False) + "\n")
        out.flush()
        on_progress(counts.kept + counts.answered + counts.failed, total)

    async def work(client: httpx2.AsyncClient) -> None:
        for request in waiting:
            write(await _answer(client, request))

    on_progress(counts.kept, total)
    for line in batch.refused:
        write(line)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
        await asyncio.gather(*(work(client) for _ in range(at_once)))
    return counts


async def _answer(client: httpx2.AsyncClient, request: BatchRequest) -> dict[str, Any]:
    for left in reversed(range(_TRIES)):
        answer = await client.post(request.url, json=request.body)
        if answer.status_code not in _FULL_OR_STARTING or not left:
            break
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
    sent = {"status_code": answer.status_code, "request_id": answer.headers["x-request-id"]}
    return _line(request.custom_id, {**sent, "body": answer.json()})


def begin_answers(path: Path, lines: Sequence[str]) -> TextIO:
    """Open the answer file with the kept answers, without losing any if interrupted."""
    fresh = path.with_name(path.name + ".part")
    fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    fresh.replace(path)
    return path.open("a", encoding="utf-8")


async def run_batch(
    settings: ServerSettings,
    supervision: SupervisorSettings,
    tokenizer: Tokenizer,
    batch: Batch,
    out: TextIO,
    on_stage: StageProgress,
    on_ready: Callable[[], Progress],
) -> BatchCounts:
    """Start an engine and answer a batch; `on_ready` returns the progress display."""
    supervisor = Supervisor(supervision, on_stage)
    context = create_context(settings, supervisor, tokenizer)
    try:
        await supervisor.start()
        return await answer_all(create_app(context), batch, out, settings.limits.running, on_ready())
    finally:
        await supervisor.stop()
        context.prompts.close()
