"""One request over HTTP, timed."""

import asyncio
from dataclasses import dataclass
from time import perf_counter

import httpx2

from foreword.bench.serve.chunks import ServerReportedError
from foreword.bench.serve.outcome import Ending, Outcome
from foreword.bench.serve.reader import AnswerReader
from foreword.bench.serve.settings import Question
from foreword.wire.openai_http import error_words, refusal_of


@dataclass(frozen=True)
class Request:
    """One request that is to be made."""

    index: int
    prompt: str
    due: float  # on the clock of perf_counter
    drop_after: int | None = None  # leave after this many chunks of text


class _Failure(Exception):  # noqa: N818 - never leaves this file
    """A request that was not answered; the ending says how."""

    def __init__(self, ending: Ending, detail: str) -> None:
        super().__init__(detail)
        self.ending = ending


async def ask(client: httpx2.AsyncClient, question: Question, request: Request, timeout: float) -> Outcome:
    """Send one request and read its answer; a failure is an outcome too."""
    outcome = Outcome(due=request.due, drop_after=request.drop_after)
    body = question.body(request.prompt, request.index)
    try:
        async with asyncio.timeout(timeout):
            await _converse(client, question.path, body, outcome)
    except TimeoutError:
        outcome.ending, outcome.detail = Ending.TIMEOUT, f"not over after {timeout:g} s"
    except _Failure as failure:
        outcome.ending, outcome.detail = failure.ending, str(failure)
    except ServerReportedError as error:
        outcome.ending, outcome.detail = Ending.REPORTED, str(error)
    except ValueError as error:
        outcome.ending, outcome.detail = Ending.MALFORMED, str(error)
    except httpx2.HTTPError as error:
        outcome.ending, outcome.detail = _transport_ending(outcome), error_words(error)
    outcome.over = perf_counter()
    return outcome


async def _converse(client: httpx2.AsyncClient, path: str, body: dict[str, object], outcome: Outcome) -> None:
    reader = AnswerReader(outcome)

    async def on_event(name: str, _: object) -> None:
        if name == "http11.send_request_body.complete":
            outcome.sent = perf_counter()

    async with client.stream("POST", path, json=body, extensions={"trace": on_event}) as response:
        outcome.status = response.status_code
        if response.status_code != 200:
            outcome.retry_after = response.headers.get("retry-after")
            raise _Failure(Ending.REFUSED, await refusal_of(response))
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise _Failure(Ending.MALFORMED, f"not a stream of events but {kind or 'of no type'}")
        async for received in response.aiter_bytes():
            reader.take(received, perf_counter())
            if _is_to_be_dropped(outcome) and not reader.is_finished:
                outcome.ending = Ending.DROPPED
                return  # leaving closes the connection: the server sees a client that went away
    if not reader.is_finished:
        raise _Failure(Ending.CUT_OFF, "the stream ended before the answer did")
    if outcome.last is None:
        raise _Failure(Ending.MALFORMED, "a stream without an answer")
    outcome.ending = Ending.COMPLETED


def _is_to_be_dropped(outcome: Outcome) -> bool:
    return outcome.drop_after is not None and len(outcome.chunks) >= outcome.drop_after


def _transport_ending(outcome: Outcome) -> Ending:
    return Ending.NO_CONNECTION if outcome.status is None else Ending.CUT_OFF
