"""Forwards requests to targets and answers back, with metrics."""

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
from foreword.server.router.targets import PrefixMemory, RoutedTarget, Targets, prompt_of
from foreword.wire.openai_http import error_words


class RouterMetrics:
    """Metrics by target."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"foreword:router_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"foreword:router_target_{name}", text, ["target"], registry=registry)

        self.answers = counter("answers", "Answers by status, or broken or aborted.", "target", "code")
        self.retries = counter("retries", "Requests that another target got, by reason.", "reason")
        self.refusals = counter("refusals", "Requests that no target got.", "code")
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
"""Content types of answers that may end with an error event."""

_FULL_OR_LEAVING = (429, 503)
"""Statuses after which another target is tried."""

_NOT_PASSED_ON = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_NOT_TO_TARGETS = _NOT_PASSED_ON | {b"host", b"content-length", b"origin", b"x-request-id"}
_NOT_TO_CLIENTS = _NOT_PASSED_ON | {b"date", b"x-request-id"}


class NotTakenError(Exception):
    """A target did not answer, and nothing was forwarded: another one may be tried."""

    def __init__(self, reason: str, answer: Response | None = None) -> None:
        super().__init__(reason)
        self.answer = answer  # its answer, if any


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
        prefixes = self._prefixes.keys(_tenant(request), prompt_of(body))
        preferred = self._prefixes.find(prefixes)
        tried: list[str] = []
        refusal: Response | None = None
        with self._admission.admit(1):
            while (target := self._targets.choose(preferred, tried)) is not None:
                tried.append(target.url)
                try:
                    with target.serving():
                        passage = _Passage(request, body, send)
                        status = await passage.through(target, self._client, self._metrics)
                except NotTakenError as error:
                    refusal = error.answer or refusal
                    self._metrics.retries.labels(str(error)).inc()
                    continue
                self._metrics.prefix_hits.inc(target.url == preferred)
                if status < 400:  # do not remember refused requests
                    self._prefixes.note(prefixes, target.url)
                target.answered += 1
                return
        if refusal is not None:  # all candidates refused
            self._metrics.note_refusal(refusal.status_code)
            await refusal(request.scope, request.receive, send)
            return
        raise ApiError(
            503,
            f"none of {len(list(self._targets))} targets takes requests; try again",
            code="no_target",
            retry_after=1,
        )


class RelayedResponse(Response):
    """A response forwarded from a target; aborted when the client disconnects."""

    def __init__(self, relay: Relay, request: Request, body: bytes = b"") -> None:
        super().__init__()
        self._relay = relay
        self._request = request
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_begun = False

        async def sending(message: object) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)  # type: ignore[arg-type]

        try:
            await cancel_on_disconnect(self._request, self._relay.answer(self._request, self._body, sending))
        except ApiError:
            if not is_begun:
                raise


@dataclass
class _Passage:
    """One request to one target."""

    _request: Request
    _body: bytes
    _send: Send

    async def through(self, target: RoutedTarget, client: httpx2.AsyncClient, metrics: RouterMetrics) -> int:
        """Return the forwarded status; raise `NotTakenError` if nothing was forwarded."""
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
            raise NotTakenError("down") from None
        except httpx2.TransportError:
            raise NotTakenError("broke off") from None
        try:
            await self._pass_back(answer, target, metrics)
            return answer.status_code
        finally:
            await answer.aclose()

    async def _pass_back(self, answer: httpx2.Response, target: RoutedTarget, metrics: RouterMetrics) -> None:
        given = [(name.lower(), value) for name, value in answer.headers.raw]
        headers = [(name, value) for name, value in given if name not in _NOT_TO_CLIENTS]
        if answer.status_code in _FULL_OR_LEAVING:
            raise NotTakenError(str(answer.status_code), await _whole(answer, headers))
        async with aclosing(answer.aiter_raw()) as parts:
            try:
                first = await anext(parts, b"")
            except httpx2.TransportError:
                raise NotTakenError("broke off") from None
            code = ABORTED  # replaced once the answer is complete
            try:
                start = {"status": answer.status_code, "headers": headers}
                await self._send({"type": "http.response.start", **start})
                await self._send({"type": "http.response.body", "body": first, "more_body": True})
                is_whole = await self._rest(parts, answer, target, metrics)
                code = str(answer.status_code) if is_whole else BROKEN
            finally:
                metrics.answers.labels(target.url, code).inc()

    async def _rest(
        self,
        parts: AsyncIterator[bytes],
        answer: httpx2.Response,
        target: RoutedTarget,
        metrics: RouterMetrics,
    ) -> bool:
        """Forward what follows the first bytes; return False if the target failed. No other target can continue."""
        last, is_whole = b"", True
        try:
            async for part in parts:
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx2.TransportError as error:
            metrics.broken.labels(target.url).inc()
            log.warning("an answer of %s broke off: %s", target.url, error_words(error))
            is_whole = False
            mark_broken(self._request.scope)
            if not answer.headers.get("content-type", "").startswith(_STREAMS):
                return is_whole  # unfinished: the client's connection is closed
            broken = ApiError(500, "the target broke off this answer", code="target_lost")
            path = self._request.url.path
            framing = framing_of(path)
            last = framing.write(broken.body(path)) + framing.end
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
        return is_whole

    def _path(self) -> str:
        scope = self._request.scope
        path: bytes = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        return path.decode("ascii")

    def _headers(self) -> list[tuple[bytes, bytes]]:
        given = [(name, value) for name, value in self._request.headers.raw if name not in _NOT_TO_TARGETS]
        return [*given, (b"x-request-id", self._request.state.request_id.encode("ascii"))]


async def _whole(answer: httpx2.Response, headers: Sequence[tuple[bytes, bytes]]) -> Response:
    try:
        body = b"".join([part async for part in answer.aiter_raw()])
    except httpx2.TransportError:
        body = msgspec.json.encode(ApiError(answer.status_code, "the target is full or leaving").body())
    found = Response(body, answer.status_code)
    kept = [(name, value) for name, value in headers if name != b"content-length"]
    found.raw_headers = [*kept, (b"content-length", str(len(body)).encode())]
    return found


def _tenant(request: Request) -> bytes:
    """Return the tenant: one per key, whether or not the router knows the keys."""
    return "\0".join(given_keys(request.headers)).encode("utf-8", "surrogateescape")
