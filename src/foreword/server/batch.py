"""Answers OpenAI batch files through the server's routes, without a port."""

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

_ATTEMPTS = 3
"""Maximum attempts per request."""

_RETRIED_STATUSES = (429, 503)  # the server is full, or its engine is restarting

_JSON = {"content-type": "application/json"}

_LINE_START = '{"id": "batch_req_'
"""Start of every line of an answer file."""


class LineError(RequestError):
    """A line of a batch is not a valid request."""


@dataclass(frozen=True)
class BatchRequest:
    """A valid line of a batch file."""

    custom_id: str
    url: str  # one of `URLS`
    body: bytes  # JSON

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
            raise LineError("body.stream: a batch does not stream; leave it out")
        return BatchRequest(custom_id, value["url"], _encoded("body", {**body, "stream": False}))


@dataclass
class BatchCounts:
    """Numbers of requests of a batch, by outcome."""

    kept: int = 0  # final answers of earlier runs
    answered: int = 0  # answered by this run
    failed: int = 0  # failed in this run
    failed_before: int = 0  # errors among the final answers of earlier runs

    @property
    def done(self) -> int:
        """Number of requests with a line in the answer file."""
        return self.kept + self.answered + self.failed


@dataclass
class Batch:
    """The requests of a batch file that have no final answer yet, and the existing answers."""

    requests: list[BatchRequest] = field(default_factory=list)
    kept_lines: list[str] = field(default_factory=list)  # lines of the answer file that stay
    refusals: list[dict[str, Any]] = field(default_factory=list)  # answers to invalid lines
    counts: BatchCounts = field(default_factory=BatchCounts)

    @property
    def total(self) -> int:
        """Number of lines of a complete answer file."""
        return len(self.kept_lines) + len(self.refusals) + len(self.requests)

    @staticmethod
    def of(lines: Iterable["_NumberedLine"], kept: dict[str, "_EarlierAnswer"]) -> "Batch":
        """Parse the lines of a batch file; `kept` are the final answers of earlier runs, by custom_id.

        Raise `RequestError` if one of these answers has no request in the file.
        """
        batch = Batch(kept_lines=[answer.line for answer in kept.values()])
        batch.counts = BatchCounts(len(kept), failed_before=sum(answer.is_error for answer in kept.values()))
        seen: set[str] = set()
        without_request = set(kept)
        for number, line in lines:
            custom_id = (
                None  # the error of a duplicate has no custom_id: it would be taken for the earlier request's
            )
            try:
                value, line_id = _object_and_id(line)
                if line_id in seen:
                    raise LineError(f"custom_id: {line_id[:64]!r} is that of an earlier line")
                custom_id = line_id
                seen.add(custom_id)
                request = BatchRequest.of(custom_id, value)
            except LineError as error:
                reason = {"code": "invalid_line", "message": f"line {number}: {error}"}
                batch.refusals.append(_answer_line(custom_id, None, reason))
                continue
            without_request.discard(custom_id)
            if custom_id not in kept:
                batch.requests.append(request)
        if without_request:
            raise RequestError(
                f"the answer file has an answer to {min(without_request)[:64]!r}, which is not in the file of "
                "requests; name another answer file"
            )
        return batch


@contextmanager
def open_batch(requests: Path, answers: Path) -> Iterator[tuple[Batch, TextIO]]:
    """Yield the batch, and its answer file: open for appending, and locked.

    First, the answer file is replaced by one that has only the final answers of earlier runs.
    """
    lines = list(_numbered_lines(requests))
    target = answers.resolve()  # a symbolic link is followed, not replaced
    part = target.with_name(target.name + ".part")  # the file that replaces `target`
    with ExitStack() as files:
        with _write_errors(answers):
            if target.exists() and target.samefile(requests):
                raise RequestError(f"{answers} is the file of requests; name another one for the answers")
            if target.exists() and not target.is_file():
                raise RequestError(f"{answers} is not a regular file; name another one")
            files.enter_context(_open_locked(target, "a"))
        batch = Batch.of(lines, _earlier_answers(answers))
        with _write_errors(answers):
            out = files.enter_context(_open_locked(part, "w"))
            out.writelines(f"{line}\n" for line in batch.kept_lines)
            out.flush()
            shutil.copymode(target, part)
            part.replace(target)
        yield batch, out


@contextmanager
def _write_errors(path: Path | str) -> Iterator[None]:
    """Raise `RequestError` for an `OSError` of the block, which writes to `path`."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}") from None


def _open_locked(path: Path, mode: Literal["a", "w"]) -> TextIO:
    """Open and lock a file; raise `RequestError` if another run has locked it."""
    # "backslashreplace" writes a lone surrogate as JSON does: \udXXX.
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


_NumberedLine = tuple[int, str]  # (line number from 1 on, text)


def _numbered_lines(path: Path, errors: str = "strict") -> Iterator[_NumberedLine]:
    """Yield the lines that are not blank; `errors` is the argument of `open`."""
    try:
        with path.open(encoding="utf-8-sig", errors=errors) as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None


def _object_and_id(line: str) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a line, and its custom_id."""
    value = _parse_json(line)
    if not isinstance(value, dict):
        raise LineError("must be a JSON object with custom_id, method, url and body")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("custom_id: must be a text that is not empty")
    return value, custom_id


def _parse_json(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise LineError("is not JSON") from None


def _encoded(name: str, value: object) -> bytes:
    """Return a field's value as JSON; raise `LineError` for NaN and lone surrogates, which `json.loads` accepts."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise LineError(f"{name}: is not valid JSON: {error}") from None


@dataclass(frozen=True)
class _EarlierAnswer:
    """A final answer of an earlier run."""

    line: str
    is_error: bool


def _earlier_answers(path: Path) -> dict[str, _EarlierAnswer]:
    """Return the final answers in an answer file, by custom_id; raise `RequestError` for a line that is no answer.

    Server errors (500 and above) and errors without a response are not final: these requests are repeated.
    """
    kept: dict[str, _EarlierAnswer] = {}
    for number, line in _numbered_lines(path, "backslashreplace"):  # the last line may end within a character
        try:
            value = _parse_json(line)
        except LineError:
            value = None
            if not line.endswith("\n") and (line.startswith(_LINE_START) or _LINE_START.startswith(line)):
                continue  # an interrupted run has written part of the line
        match value:
            case {"custom_id": str(custom_id), "response": {"status_code": int(status)}}:
                if status < 500:
                    kept[custom_id] = _EarlierAnswer(line.rstrip("\n"), status >= 400)
            case {"custom_id": str() | None, "response": None, "error": {"message": _}}:
                pass  # not final
            case _:
                raise RequestError(f"{path}: line {number} is not an answer of a batch; name another file")
    return kept


def _answer_line(custom_id: str | None, response: object, error: object = None) -> dict[str, Any]:
    """Return a line of the answer file, with either a response or an error."""
    return {"id": f"batch_req_{token_hex(12)}", "custom_id": custom_id, "response": response, "error": error}


async def answer_all(
    app: FastAPI, batch: Batch, out: TextIO, concurrency: int, on_progress: Progress
) -> None:
    """Answer all requests, `concurrency` at a time; write and count each answer when it is complete."""
    counts = batch.counts
    remaining = iter(batch.requests)

    def write(line: dict[str, Any]) -> None:
        response = line["response"]
        is_answer = response is not None and response["status_code"] < 400
        counts.answered += is_answer
        counts.failed += not is_answer
        with _write_errors("the answer file"):
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
        on_progress(counts.done, batch.total)

    async def answer_remaining(client: httpx2.AsyncClient) -> None:
        for request in remaining:
            write(await _answer(client, request))

    on_progress(counts.done, batch.total)
    for line in batch.refusals:
        write(line)
    # With `raise_app_exceptions=False`, a route that raises an exception responds with status 500.
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
        await asyncio.gather(*(answer_remaining(client) for _ in range(concurrency)))


async def _answer(client: httpx2.AsyncClient, request: BatchRequest) -> dict[str, Any]:
    """Send a request, repeatedly if necessary; return its line of the answer file."""
    for attempt in range(1, _ATTEMPTS + 1):
        answer = await client.post(request.url, content=request.body, headers=_JSON)
        if answer.status_code not in _RETRIED_STATUSES or attempt == _ATTEMPTS:
            break
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
    response = {"status_code": answer.status_code, "request_id": answer.headers.get("x-request-id", "")}
    return _answer_line(request.custom_id, {**response, "body": answer.json()})


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
