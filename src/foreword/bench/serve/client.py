"""One request over HTTP, timed."""

import asyncio
import json
from dataclasses import dataclass
from time import perf_counter

import httpx2

from foreword.bench.serve.chunks import ServerReportedError
from foreword.bench.serve.outcome import Ending, Outcome
from foreword.bench.serve.reader import AnswerReader
from foreword.bench.serve.settings import Question
from foreword.errors import RequestError

MODELS_TIMEOUT = 30.0  # seconds for the list of models
MOST_OF_A_REFUSAL = 65_536  # bytes of an error's body that are read
CONNECT_TIMEOUT = 30.0  # seconds; how long an answer may take is the load's own timeout


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


def open_client(address: str, api_key: str | None) -> httpx2.AsyncClient:
    """A client without a bound on connections, and without the proxies and passwords of the environment."""
    headers = {"Accept-Encoding": "identity"}  # compression would hold chunks back
    if api_key:
        if not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("--api-key must be printable ASCII")
        headers["Authorization"] = f"Bearer {api_key}"
    return httpx2.AsyncClient(
        base_url=address,
        headers=headers,
        timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


@dataclass(frozen=True)
class ListedModel:
    """A model of the server's list."""

    name: str
    owner: str | None = None

    @property
    def has_continuous_usage(self) -> bool:
        """Whether the server is known to tell the number of tokens with every chunk."""
        return self.owner in ("foreword", "vllm")


async def listed_model(client: httpx2.AsyncClient, name: str = "") -> ListedModel:
    """The server's model of this name, or its first; with a name, a server that does not tell is no failure."""
    try:
        models = await _models(client)
    except RequestError:
        if not name:
            raise
        return ListedModel(name)
    found = [model for model in models if not name or model.name == name]
    return found[0] if found else ListedModel(name)


async def _models(client: httpx2.AsyncClient) -> list[ListedModel]:
    try:
        response = await client.get("/v1/models", timeout=MODELS_TIMEOUT)
    except httpx2.HTTPError as error:
        raise RequestError(f"no server answers at {client.base_url}: {_words(error)}") from None
    if response.status_code != 200:
        raise RequestError(
            f"{client.base_url}v1/models answers {response.status_code}: name the model with --model, "
            "or give a key with --api-key"
        )
    try:
        listed = [(entry["id"], entry.get("owned_by")) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        listed = []
    models = [ListedModel(name, owner) for name, owner in listed if isinstance(name, str)]
    if not models:
        raise RequestError(f"{client.base_url}v1/models names no model: name it with --model")
    return models


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
        outcome.ending, outcome.detail = _transport_ending(outcome), _words(error)
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
            raise _Failure(Ending.REFUSED, await _refusal(response))
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


async def _refusal(response: httpx2.Response) -> str:
    """The server's message; reading it to its end lets the next request use the connection."""
    body = b""
    async for received in response.aiter_bytes():
        body += received
        if len(body) > MOST_OF_A_REFUSAL:
            break
    try:
        error = json.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        message = response.reason_phrase
    return " ".join(str(message).split())[:200]


def _is_to_be_dropped(outcome: Outcome) -> bool:
    return outcome.drop_after is not None and len(outcome.chunks) >= outcome.drop_after


def _transport_ending(outcome: Outcome) -> Ending:
    return Ending.NO_CONNECTION if outcome.status is None else Ending.CUT_OFF


def _words(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
