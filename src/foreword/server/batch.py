"""Processes OpenAI batch files through the server's routes, without a port."""

import asyncio
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, TextIO

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

_JSON = {"content-type": "application/json"}

_LINE_START = '{"id": "batch_req_'
"""Start of every line of an answer file."""


class LineError(RequestError):
    """A line of a batch is not a valid request."""


@dataclass(frozen=True)
class BatchRequest:
    """One line of a batch."""

    custom_id: str
    url: str
    body: bytes

    @staticmethod
    def of(custom_id: str, value: dict[str, Any]) -> "BatchRequest":
        """Check a line's JSON; raise `LineError` with the invalid field."""
        _encoded("custom_id", custom_id)
        body = value.get("body")
        if value.get("method") != "POST":
            raise LineError("method: must be POST")
        if value.get("url") not in URLS:
            raise LineError(f"url: must be one of {', '.join(URLS)}")
        if not isinstance(body, dict):
            raise LineError("body: must be an object")
        if body.get("stream"):
            raise LineError("body.stream: answers of a batch are whole; leave it out")
        return BatchRequest(custom_id, value["url"], _encoded("body", {**body, "stream": False}))


@dataclass
class BatchCounts:
    """Outcomes of a batch."""

    kept: int = 0  # answers of an earlier run
    answered: int = 0
    failed: int = 0
    failed_before: int = 0  # errors among the kept answers

    @property
    def done(self) -> int:
        """Requests with a line in the answer file."""
        return self.kept + self.answered + self.failed


@dataclass
class Batch:
    """Unanswered requests of a file, and existing answers."""

    requests: list[BatchRequest] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)  # lines of the answer file
    refused: list[dict[str, Any]] = field(default_factory=list)  # answers to invalid lines
    counts: BatchCounts = field(default_factory=BatchCounts)

    @property
    def total(self) -> int:
        """Lines of a complete answer file."""
        return len(self.answered) + len(self.refused) + len(self.requests)

    @staticmethod
    def of(lines: Iterable["_Line"], kept: dict[str, "_Kept"]) -> "Batch":
        """Parse the lines of requests; those with a kept answer are done."""
        batch = Batch(answered=[one.line for one in kept.values()])
        batch.counts = BatchCounts(len(kept), failed_before=sum(one.is_error for one in kept.values()))
        seen: set[str] = set()
        without_request = set(kept)
        for number, line in lines:
            custom_id = None  # of the error line; an earlier line's id would name two lines
            try:
                value, found = _identified(line)
                if found in seen:
                    raise LineError(f"custom_id: {found[:64]!r} is that of an earlier line")
                seen.add(custom_id := found)
                request = BatchRequest.of(custom_id, value)
            except LineError as error:
                batch.refused.append(_failure(custom_id, f"line {number}: {error}"))
                continue
            without_request.discard(custom_id)
            if custom_id not in kept:
                batch.requests.append(request)
        if without_request:
            raise RequestError(
                f"the answer file has an answer to {min(without_request)[:64]!r}, which is not in the file of "
                "requests; name another one"
            )
        return batch


@contextmanager
def open_batch(requests: Path, answers: Path) -> Iterator[tuple[Batch, TextIO]]:
    """Read both files; yield the batch and the answer file, locked, with the answers that are kept."""
    lines = list(_lines(requests))
    target = answers.resolve()  # a symbolic link is followed, not replaced
    part = target.with_name(target.name + ".part")
    with ExitStack() as files:
        with _writing(answers):
            if target.exists() and target.samefile(requests):
                raise RequestError(f"{answers} is the file of requests; name another one for the answers")
            if target.exists() and not target.is_file():
                raise RequestError(f"{answers} is not a regular file; name another one")
            files.enter_context(_locked(target, "a"))
        batch = Batch.of(lines, _kept(answers))
        with _writing(answers):
            out = files.enter_context(_locked(part, "w"))
            out.writelines(f"{line}\n" for line in batch.answered)
            out.flush()
            shutil.copymode(target, part)
            part.replace(target)
        yield batch, out


@contextmanager
def _writing(path: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}") from None


def _locked(path: Path, mode: Literal["a", "w"]) -> TextIO:
    """Open a file for this run alone; raise `RequestError` if another run has it."""
    # A lone surrogate is written as JSON's escape of it, which is backslashreplace's, too.
    file = path.open(mode, encoding="utf-8", errors="backslashreplace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another run may have replaced the file since it was opened here.
        is_ours = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except BlockingIOError:
        is_ours = False
    if not is_ours:
        file.close()
        raise RequestError(f"{path} is in use by another foreword batch; wait for it, or name another file")
    return file


_Line = tuple[int, str]  # its number, from 1 on, and its text


def _lines(path: Path, errors: str = "strict") -> Iterator[_Line]:
    try:
        with path.open(encoding="utf-8-sig", errors=errors) as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None


def _identified(line: str) -> tuple[dict[str, Any], str]:
    """Return a line's object and its custom_id."""
    value = _json(line)
    if not isinstance(value, dict):
        raise LineError("must be a JSON object with custom_id, method, url and body")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("custom_id: must be a text that is not empty")
    return value, custom_id


def _json(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise LineError("is not JSON") from None


def _encoded(name: str, value: object) -> bytes:
    """Return a field as JSON; Python reads NaN and lone surrogates, which JSON in UTF-8 cannot have."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise LineError(f"{name}: is not valid JSON: {error}") from None


@dataclass(frozen=True)
class _Kept:
    """A final answer of an earlier run."""

    line: str
    is_error: bool


def _kept(path: Path) -> dict[str, _Kept]:
    """Read final answers by custom_id; raise `RequestError` if other lines than answers would be lost."""
    kept: dict[str, _Kept] = {}
    for number, line in _lines(path, "backslashreplace"):  # a last line may end within a character
        try:
            value = _json(line)
        except LineError:
            value = None
            if not line.endswith("\n") and (line.startswith(_LINE_START) or _LINE_START.startswith(line)):
                continue  # an interrupted run has cut it
        match value:
            case {"custom_id": str(custom_id), "response": {"status_code": int(status)}}:
                if status < 500:
                    kept[custom_id] = _Kept(line.rstrip("\n"), status >= 400)
            case {"custom_id": str() | None, "response": None, "error": {"message": _}}:
                pass  # it is tried again
            case _:
                raise RequestError(f"{path}: line {number} is not an answer of a batch; name another file")
    return kept


def _failure(custom_id: str | None, message: str, code: str = "invalid_line") -> dict[str, Any]:
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str | None, response: object, error: object = None) -> dict[str, Any]:
    return {"id": f"batch_req_{token_hex(12)}", "custom_id": custom_id, "response": response, "error": error}


async def answer_all(app: FastAPI, batch: Batch, out: TextIO, at_once: int, on_progress: Progress) -> None:
    """Answer all requests, `at_once` at a time; write each answer when it is complete."""
    counts = batch.counts
    waiting = iter(batch.requests)

    def write(line: dict[str, Any]) -> None:
        response = line["response"]
        is_answer = response is not None and response["status_code"] < 400
        counts.answered += is_answer
        counts.failed += not is_answer
        with _writing("the answer file"):
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
        on_progress(counts.done, batch.total)

    async def work(client: httpx2.AsyncClient) -> None:
        for request in waiting:
            write(await _answer(client, request))

    on_progress(counts.done, batch.total)
    for line in batch.refused:
        write(line)
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)  # a route that raises answers 500
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
        await asyncio.gather(*(work(client) for _ in range(at_once)))


async def _answer(client: httpx2.AsyncClient, request: BatchRequest) -> dict[str, Any]:
    for left in reversed(range(_TRIES)):
        answer = await client.post(request.url, content=request.body, headers=_JSON)
        if answer.status_code not in _FULL_OR_STARTING or not left:
            break
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
    sent = {"status_code": answer.status_code, "request_id": answer.headers.get("x-request-id", "")}
    return _line(request.custom_id, {**sent, "body": answer.json()})


async def run_batch(
    settings: ServerSettings,
    supervision: SupervisorSettings,
    tokenizer: Tokenizer,
    batch: Batch,
    out: TextIO,
    on_stage: StageProgress,
    on_ready: Callable[[], Progress],
) -> None:
    """Start an engine and answer a batch; `on_ready` returns the progress display."""
    supervisor = Supervisor(supervision, on_stage)
    context = create_context(settings, supervisor, tokenizer)
    try:
        await supervisor.start()
        await answer_all(create_app(context), batch, out, settings.limits.running, on_ready())
    finally:
        await supervisor.stop()
        context.prompts.close()
