"""Client of the examined server, which counts its requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from foreword.errors import RequestError
from foreword.wire.openai_http import EventParser, error_words, refusal_of

HALF = "\ufffd"
"""Text of a token that is a part of a character.

Several tokens have this text. So a list by text holds only one of them, and lengths of such texts are unreliable.
"""


@dataclass(frozen=True)
class Token:
    """A token of an answer with its log-probabilities."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]  # most likely tokens at its position, with log-probabilities


@dataclass
class ReceivedChoice:
    """One answer of a request."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)  # empty without requested log-probabilities
    offsets: list[int] = field(default_factory=list)  # empty on the chat route
    token_ids: list[int] | None = None

    def take(self, received: Mapping[str, Any]) -> None:
        """Add a choice of a complete answer or of a chunk."""
        self.text += _text(received)
        self.finish_reason = received.get("finish_reason") or self.finish_reason
        if isinstance(ids := received.get("token_ids"), list):
            self.token_ids = [*(self.token_ids or []), *ids]
        if isinstance(logprobs := received.get("logprobs"), Mapping):
            self._take_logprobs(logprobs)

    def _take_logprobs(self, received: Mapping[str, Any]) -> None:
        if isinstance(content := received.get("content"), list):
            for entry in content:
                top = ((other["token"], other["logprob"]) for other in entry.get("top_logprobs") or ())
                self.tokens.append(Token(entry["token"], entry["logprob"], _ranked(top)))
            return
        tops = received.get("top_logprobs") or [None] * len(received["tokens"])
        for text, logprob, top in zip(received["tokens"], received["token_logprobs"], tops, strict=True):
            # A prompt's first token has no log-probability.
            self.tokens.append(Token(text, 0.0 if logprob is None else logprob, _ranked((top or {}).items())))
        self.offsets += received.get("text_offset") or []


@dataclass(frozen=True)
class TokenUsage:
    """Token counts reported by the server."""

    prompt: int
    completion: int
    total: int


@dataclass
class ServerAnswer:
    """All answers to one request."""

    body: Mapping[str, Any]  # the request
    choices: dict[int, ReceivedChoice] = field(default_factory=dict)  # by index
    usage: TokenUsage | None = None
    prompt_ids: list[int] | None = None

    def take(self, received: Mapping[str, Any]) -> None:
        """Add a complete answer or a chunk; raise KeyError, TypeError or ValueError if invalid."""
        for choice in received["choices"]:
            self.choices.setdefault(int(choice.get("index", 0)), ReceivedChoice()).take(choice)
            if isinstance(ids := choice.get("prompt_token_ids"), list):
                self.prompt_ids = ids
        if isinstance(ids := received.get("prompt_token_ids"), list):
            self.prompt_ids = ids
        if isinstance(usage := received.get("usage"), Mapping):
            counts = (usage[f"{name}_tokens"] for name in ("prompt", "completion", "total"))
            self.usage = TokenUsage(*counts)

    @property
    def first(self) -> ReceivedChoice:
        """The first answer."""
        return self.choices.get(0) or ReceivedChoice()

    @property
    def is_cut(self) -> bool:
        """True if a choice has no finish_reason."""
        return not self.choices or any(choice.finish_reason is None for choice in self.choices.values())

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of every choice, as listed, otherwise the mean of `usage`; empty if unknown."""
        listed = [len(choice.token_ids or choice.tokens) for choice in self.choices.values()]
        if all(listed) or self.usage is None:
            return [length for length in listed if length]
        return [self.usage.completion // len(listed)] * len(listed)

    @property
    def text(self) -> str:
        return self.first.text

    @property
    def contents(self) -> list[tuple[int, str, str | None]]:
        """Index, text and finish reason of every choice."""
        return [(i, self.choices[i].text, self.choices[i].finish_reason) for i in sorted(self.choices)]


def _text(received: Mapping[str, Any]) -> str:
    part = received.get("delta") or received.get("message")
    text = part.get("content") if isinstance(part, Mapping) else received.get("text")
    return text or ""


def _ranked(pairs: Any) -> tuple[tuple[str, float], ...]:  # noqa: ANN401 - pairs of whatever the server sent
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))


Body = dict[str, Any]

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BUSY = (429, 503)  # HTTP statuses after which a request is retried
MAX_RETRIES = 8
TIMEOUT_SECONDS = 600.0
LONGEST_PAUSE = 5.0  # seconds between retries
DONE = b"[DONE]"


class RefusedByServer(Exception):  # noqa: N818 - named after the server's reply
    """The server does not support a request's fields."""


class Broken(Exception):  # noqa: N818 - named after the server's fault
    """The server failed, or its answer is invalid."""

    def __init__(self, message: str, body: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.body = body


class Server:
    """Client for one model of a server; it adds the fields `extra` to every body."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        model: str,
        route: str = "completions",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._client = client
        self.model = model
        self.route = route
        self.extra = dict(extra or {})
        self.requests = 0

    @property
    def address(self) -> str:
        return f"{str(self._client.base_url).rstrip('/')}{ROUTES[self.route]}"

    def wire_body(self, body: Body, *, streamed: bool = False) -> Body:
        """Return the JSON to send; on the chat route, the prompt becomes a message."""
        sent: Body = {"model": self.model, **body, **self.extra}
        if streamed:
            sent |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.route == "chat":
            sent["messages"] = [{"role": "user", "content": sent.pop("prompt")}]
            if (top := sent.pop("logprobs", None)) is not None:
                sent |= {"logprobs": True, "top_logprobs": top}
        return sent

    async def send(self, body: Body, *, streamed: bool) -> ServerAnswer:
        """Return the answer, complete or assembled from chunks."""
        return await (self.stream(body) if streamed else self.ask(body))

    async def ask(self, body: Body) -> ServerAnswer:
        """Return the answer to a request without streaming."""
        answer = ServerAnswer(self.wire_body(body))
        async with self._response(answer.body, "answer") as response:
            answer.take(json.loads(await response.aread()))
        return answer

    async def stream(self, body: Body) -> ServerAnswer:
        """Return the answer assembled from chunks."""
        answer = ServerAnswer(self.wire_body(body, streamed=True))
        events, is_done = EventParser(), False
        async with self._response(answer.body, "stream") as response:
            async for received in response.aiter_bytes():
                for data in events.feed(received):
                    is_done = data.strip() == DONE
                    if not is_done:
                        answer.take(json.loads(data))
        if not is_done:
            raise Broken("the stream does not end with [DONE]", answer.body)
        return answer

    @asynccontextmanager
    async def _response(self, sent: Mapping[str, Any], what: str) -> AsyncIterator[httpx2.Response]:
        """Yield the response to a request; raise `Broken` if it cannot be read."""
        response = await self._post(sent)
        try:
            yield response
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Broken(f"the {what} is not one of OpenAI's: {error_words(error)}", sent) from None
        except httpx2.HTTPError as error:
            raise Broken(f"the {what} broke off: {error_words(error)}", sent) from None
        finally:
            await response.aclose()

    async def _post(self, sent: Mapping[str, Any]) -> httpx2.Response:
        for attempt in range(MAX_RETRIES + 1):
            self.requests += 1
            try:
                route = ROUTES[self.route]
                request = self._client.build_request("POST", route, json=sent, timeout=TIMEOUT_SECONDS)
                response = await self._client.send(request, stream=True)
            except httpx2.HTTPError as error:
                raise RequestError(f"{self.address} does not answer: {error_words(error)}") from None
            if response.status_code == 200:
                return response
            reason = f"{response.status_code}: {await refusal_of(response)}"
            await response.aclose()
            if response.status_code not in BUSY or attempt == MAX_RETRIES:
                break
            await asyncio.sleep(_pause(response.headers.get("retry-after")))
        if response.status_code in (401, 403, 404):
            raise RequestError(f"{self.address} answers {reason}")
        raise Broken(reason, sent) if response.status_code >= 500 else RefusedByServer(reason)


def _pause(received: str | None) -> float:
    try:
        return min(float(received or 1.0), LONGEST_PAUSE)
    except ValueError:
        return 1.0
