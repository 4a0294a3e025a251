"""Forwards requests to targets, and their answers to clients, with metrics."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx2
import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreword.server.admission import Admission
from foreword.server.api.streaming import cancel_on_disconnect, framing_of
from foreword.server.errors import ApiError
from foreword.server.middleware import ABORTED, BROKEN, given_keys, mark_broken
from foreword.server.router.targets import PrefixMemory, RoutedTarget, Targets, prefix_text
from foreword.wire.openai_http import error_words


class RouterMetrics:
    """Metrics by target."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"foreword:router_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"foreword:router_target_{name}", text, ["target"], registry=registry)

        self.answers = counter("answers", "Answers by status, broken or aborted.", "target", "code")
        self.retries = counter("retries", "Attempts at a target that did not answer, by reason.", "reason")
        self.refusals = counter("refusals", "Requests that no target answered.", "code")
        self.broken = counter("broken", "Answers that broke off after their first byte.", "target")
        self.prefix_hits = counter("prefix_hits", "Requests sent to the target that knew their prefix.")
        self._ready = gauge("ready", "1 while it takes requests.")
        self._load = gauge("load", "Requests that it has.")
        self._in_flight = gauge("in_flight", "Requests of this router that it has.")

    def note_refusal(self, status: int) -> None:
        self.refusals.labels(str(status)).inc()

    def exposition(self, targets: Targets) -> bytes:
        """Return all metrics in Prometheus's text format."""
        for gauge in (self._ready, self._load, self._in_flight):
            gauge.clear()  # removed targets are not exported
        for target in targets:
            self._ready.labels(target.url).set(target.is_ready)
            self._load.labels(target.url).set(target.load)
            self._in_flight.labels(target.url).set(target.in_flight)
        return generate_latest(self._registry)


log = logging.getLogger("foreword.router")

_STREAMS = ("text/event-stream", "application/x-ndjson")
"""Content types of streams, which may end with an error event."""

_FULL_OR_STOPPING = (429, 503)
"""Statuses after which another target is tried."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_NOT_TO_TARGETS = _HOP_BY_HOP | {b"host", b"content-length", b"origin", b"x-request-id"}
_NOT_TO_CLIENTS = _HOP_BY_HOP | {b"date", b"x-request-id"}


class NotAnsweredError(Exception):
    """A target did not answer, or refused the request: nothing was forwarded, and another target may be tried."""

    def __init__(self, reason: str, refusal: Response | None = None) -> None:
        super().__init__(reason)
        self.refusal = refusal  # the target's response, if any


@dataclass
class Relay:
    """Forwards requests to the targets."""

    _targets: Targets
    _client: httpx2.AsyncClient
    _admission: Admission
    _metrics: RouterMetrics
    _prefixes: PrefixMemory = field(default_factory=PrefixMemory)

    async def answer(self, request: Request, body: bytes, send: Send) -> None:
        """Try targets until one answers; raise `ApiError` if none does."""
        prefixes = self._prefixes.keys(_tenant(request), prefix_text(body))
        preferred = self._prefixes.find(prefixes)
        tried: list[str] = []
        refusal: Response | None = None
        with self._admission.admit(1):
            while (target := self._targets.choose(preferred, tried)) is not None:
                tried.append(target.url)
                try:
                    with target.serving():
                        forwarded = _ForwardedRequest(request, body, send)
                        status = await forwarded.send_to(target, self._client, self._metrics)
                except NotAnsweredError as error:
                    refusal = error.refusal or refusal
                    self._metrics.retries.labels(str(error)).inc()
                    continue
                self._metrics.prefix_hits.inc(target.url == preferred)
                if status < 400:  # a refused request leaves no prefix in the target's cache
                    self._prefixes.note(prefixes, target.url)
                target.answered += 1
                return
        if refusal is not None:  # no target answered, and at least one refused the request
            self._metrics.note_refusal(refusal.status_code)
            await refusal(request.scope, request.receive, send)
            return
        raise ApiError(
            503,
            f"none of the router's {len(list(self._targets))} targets accepts requests; try again",
            code="no_target",
            retry_after=1,
        )


class RelayedResponse(Response):
    """A response that is forwarded from a target, and aborted when the client disconnects."""

    def __init__(self, relay: Relay, request: Request, body: bytes = b"") -> None:
        super().__init__()
        self._relay = relay
        self._request = request
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def tracked_send(message: object) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)  # type: ignore[arg-type]

        try:
            answer = self._relay.answer(self._request, self._body, tracked_send)
            await cancel_on_disconnect(self._request, answer)
        except ApiError:
            if not has_begun:
                raise


@dataclass
class _ForwardedRequest:
    """A request that is forwarded to one target."""

    _request: Request
    _body: bytes
    _send: Send

    async def send_to(self, target: RoutedTarget, client: httpx2.AsyncClient, metrics: RouterMetrics) -> int:
        """Forward the request to a target and its answer to the client; return the answer's status.

        Raise `NotAnsweredError` if no part of an answer was forwarded.
        """
        outgoing = client.build_request(
            self._request.method,
            target.url + self._path(),
            headers=self._headers(),
            content=self._body or None,
        )
        try:
            answer = await client.send(outgoing, stream=True)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            target.mark_unavailable("down", error_words(error))
            raise NotAnsweredError("down") from None
        except httpx2.TransportError:
            raise NotAnsweredError("broke off") from None
        try:
            await self._forward_answer(answer, target, metrics)
            return answer.status_code
        finally:
            await answer.aclose()

    async def _forward_answer(
        self, answer: httpx2.Response, target: RoutedTarget, metrics: RouterMetrics
    ) -> None:
        """Forward an answer, and count it by status; raise `NotAnsweredError` if nothing was forwarded."""
        lowered = [(name.lower(), value) for name, value in answer.headers.raw]
        headers = [(name, value) for name, value in lowered if name not in _NOT_TO_CLIENTS]
        if answer.status_code in _FULL_OR_STOPPING:
            raise NotAnsweredError(str(answer.status_code), await _read_response(answer, headers))
        async with aclosing(answer.aiter_raw()) as parts:
            try:
                first = await anext(parts, b"")
            except httpx2.TransportError:
                raise NotAnsweredError("broke off") from None
            code = ABORTED  # replaced once the answer is complete
            try:
                start = {"status": answer.status_code, "headers": headers}
                await self._send({"type": "http.response.start", **start})
                await self._send({"type": "http.response.body", "body": first, "more_body": True})
                is_complete = await self._forward_rest(parts, answer, target, metrics)
                code = str(answer.status_code) if is_complete else BROKEN
            finally:
                metrics.answers.labels(target.url, code).inc()

    async def _forward_rest(
        self,
        parts: AsyncIterator[bytes],
        answer: httpx2.Response,
        target: RoutedTarget,
        metrics: RouterMetrics,
    ) -> bool:
        """Forward the part after the first bytes; return False if the target failed before the end."""
        end, is_complete = b"", True
        try:
            async for part in parts:
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx2.TransportError as error:
            metrics.broken.labels(target.url).inc()
            log.warning("an answer of %s broke off: %s", target.url, error_words(error))
            is_complete = False
            mark_broken(self._request.scope)
            if not answer.headers.get("content-type", "").startswith(_STREAMS):
                return (
                    False  # the response stays incomplete, so that the server closes the client's connection
                )
            error_event = ApiError(500, "the target broke off this answer", code="target_lost")
            path = self._request.url.path
            framing = framing_of(path)
            end = framing.write(error_event.body(path)) + framing.end
        await self._send({"type": "http.response.body", "body": end, "more_body": False})
        return is_complete

    def _path(self) -> str:
        """Return the request's path with its query."""
        scope = self._request.scope
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        path: bytes = scope["raw_path"] + query
        return path.decode("ascii")

    def _headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers for the target."""
        headers = [(name, value) for name, value in self._request.headers.raw if name not in _NOT_TO_TARGETS]
        return [*headers, (b"x-request-id", self._request.state.request_id.encode("ascii"))]


async def _read_response(answer: httpx2.Response, headers: Sequence[tuple[bytes, bytes]]) -> Response:
    """Read the rest of a target's answer; return it as a response to the client."""
    try:
        body = b"".join([part async for part in answer.aiter_raw()])
    except httpx2.TransportError:
        body = msgspec.json.encode(ApiError(answer.status_code, "the target is full or stopping").body())
    response = Response(body, answer.status_code)
    others = [(name, value) for name, value in headers if name != b"content-length"]
    response.raw_headers = [*others, (b"content-length", str(len(body)).encode())]
    return response


def _tenant(request: Request) -> bytes:
    """Return the tenant's API keys, which separate the prefixes of tenants; the targets check them."""
    return "\0".join(given_keys(request.headers)).encode("utf-8", "surrogateescape")
