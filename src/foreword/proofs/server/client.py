"""A server under examination: requests in, answers out, every request counted."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx2

from foreword.errors import RequestError
from foreword.proofs.server.answer import Answer
from foreword.wire.openai_http import EventParser, error_words, refusal_of

Body = dict[str, Any]

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BUSY = (429, 503)  # come back later
PATIENCE = 8  # times that a busy server is asked again
LONGEST_PAUSE = 5.0  # seconds before it is asked again
DONE = b"[DONE]"


class Refused(Exception):  # noqa: N818 - says what the server did
    """The server does not take such a request."""


class Broken(Exception):  # noqa: N818 - says what the server did
    """The server failed, or its answer is none."""

    def __init__(self, message: str, body: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.body = body


class Server:
    """Asks one model of one server; `extra` goes into every body."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        model: str,
        route: str = "completions",
        extra: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._client = client
        self._timeout = timeout
        self.model = model
        self.route = route
        self.extra = dict(extra or {})
        self.requests = 0

    @property
    def address(self) -> str:
        return f"{str(self._client.base_url).rstrip('/')}{ROUTES[self.route]}"

    def wire_body(self, body: Body, *, streamed: bool = False) -> Body:
        """Return the JSON that is sent: a prompt becomes a message where the route is chat."""
        sent: Body = {"model": self.model, **body, **self.extra}
        if streamed:
            sent |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.route == "chat":
            sent["messages"] = [{"role": "user", "content": sent.pop("prompt")}]
            if (top := sent.pop("logprobs", None)) is not None:
                sent |= {"logprobs": True, "top_logprobs": top}
        return sent

    async def send(self, body: Body, *, streamed: bool) -> Answer:
        """Return the answer, whole or put together from its chunks."""
        return await (self.stream(body) if streamed else self.ask(body))

    async def ask(self, body: Body) -> Answer:
        """Return the answer to a request that is not streamed."""
        sent = self.wire_body(body)
        response = await self._post(sent)
        try:
            answer = Answer(sent)
            answer.take(json.loads(await response.aread()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Broken(f"the answer is not one of OpenAI's: {error_words(error)}", sent) from None
        except httpx2.HTTPError as error:
            raise Broken(f"the answer broke off: {error_words(error)}", sent) from None
        return answer

    async def stream(self, body: Body) -> Answer:
        """Return the answer put together from its chunks."""
        sent = self.wire_body(body, streamed=True)
        response = await self._post(sent)
        answer, events, is_done = Answer(sent), EventParser(), False
        try:
            async for received in response.aiter_bytes():
                for data in events.feed(received):
                    is_done = data.strip() == DONE
                    if not is_done:
                        answer.take(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Broken(f"the stream is not one of OpenAI's: {error_words(error)}", sent) from None
        except httpx2.HTTPError as error:
            raise Broken(f"the stream broke off: {error_words(error)}", sent) from None
        finally:
            await response.aclose()
        if not is_done:
            raise Broken("the stream does not end with [DONE]", sent)
        return answer

    async def _post(self, sent: Body) -> httpx2.Response:
        for attempt in range(PATIENCE + 1):
            self.requests += 1
            try:
                request = self._client.build_request(
                    "POST", ROUTES[self.route], json=sent, timeout=self._timeout
                )
                response = await self._client.send(request, stream=True)
            except httpx2.HTTPError as error:
                raise RequestError(f"{self.address} does not answer: {error_words(error)}") from None
            if response.status_code == 200:
                return response
            reason = f"{response.status_code}: {await refusal_of(response)}"
            await response.aclose()
            if response.status_code not in BUSY or attempt == PATIENCE:
                break
            await asyncio.sleep(_pause(response.headers.get("retry-after")))
        if response.status_code in (401, 403, 404):
            raise RequestError(f"{self.address} answers {reason}")
        raise Broken(reason, sent) if response.status_code >= 500 else Refused(reason)


def _pause(told: str | None) -> float:
    try:
        return min(float(told or 1.0), LONGEST_PAUSE)
    except ValueError:
        return 1.0
