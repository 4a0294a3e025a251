"""ASGI middleware: API keys, allowed hosts and origins, request ids, access log, HEAD requests."""

import hmac
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import monotonic
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.cluster.address import is_loopback
from foreword.server.errors import ApiError
from foreword.server.page import PAGE_PATHS
from foreword.server.settings import ServerSettings, host_name, tenant_of

OPEN_PATHS = frozenset({"/health", "/ready"}) | PAGE_PATHS
"""Routes that need no key."""


class HttpMiddleware:
    """Base class: responds with the error that `_refusal` returns, otherwise passes the request on."""

    def __init__(self, app: ASGIApp, on_refusal: Callable[[int], None] = lambda status: None) -> None:
        self._app, self._on_refusal = app, on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (refusal := self._refusal(scope)) is not None:
            self._on_refusal(refusal.status)
            await refusal.response(scope["path"])(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        return None

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


@dataclass(frozen=True)
class ApiCaller:
    """The sender of a request."""

    tenant: str  # hash of the API key; empty if the server has no keys
    trusted: bool  # whether the sender gave a valid key, or none is needed
    is_admin: bool = False  # whether the sender gave an admin key


def caller_of(request: Request) -> ApiCaller:
    """Return the sender that `AuthMiddleware` has stored."""
    caller: ApiCaller = request.state.caller
    return caller


class AuthMiddleware(HttpMiddleware):
    """Refuses long headers and unknown keys, and stores the `ApiCaller` in the request's state."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_refusal: Callable[[int], None]) -> None:
        super().__init__(app, on_refusal)
        self._header_bytes = settings.limits.header_bytes
        # The sender of a request without a valid key; None: a key is required.
        self._keyless_caller = None if settings.api_keys else ApiCaller("", trusted=True)
        self._callers = {  # by digest of the key
            _digest(key): ApiCaller(tenant_of(key), trusted=True, is_admin=key in settings.admin_keys)
            for key in (*settings.api_keys, *settings.admin_keys)
        }

    def _refusal(self, scope: Scope) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._header_bytes:
            return ApiError(431, f"the request's headers are longer than {self._header_bytes} bytes")
        caller = self._caller(Headers(scope=scope))
        scope.setdefault("state", {})["caller"] = caller or ApiCaller("", trusted=False)
        if caller is None and scope["path"] not in OPEN_PATHS:
            return ApiError(
                401,
                "give this server's API key: Authorization: Bearer KEY, or X-API-Key: KEY",
                code="invalid_api_key",
            )
        return None

    def _caller(self, headers: Headers) -> ApiCaller | None:
        """Return the sender; None if a key is required and none is valid.

        Every key is compared with all valid ones, so that the time does not depend on which one matches.
        """
        caller = self._keyless_caller
        for key in given_keys(headers):
            given = _digest(key)
            for valid, owner in self._callers.items():
                if hmac.compare_digest(valid, given):
                    caller = owner
        return caller


def given_keys(headers: Headers) -> list[str]:
    """Return the API keys in a request's headers. If several are valid, the last one counts."""
    scheme, _, bearer = _utf8(headers.get("authorization", "")).partition(" ")
    keys = (_utf8(headers.get("x-api-key", "")), bearer if scheme.lower() == "bearer" else "")
    return [key.strip() for key in keys if key.strip()]


def _utf8(header: str) -> str:
    """Return a header decoded as UTF-8; Starlette has decoded it as Latin-1."""
    return header.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


class HeadMethodMiddleware(HttpMiddleware):
    """Lets routes handle HEAD as GET; the web server omits the body."""

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


ANY = "*"
"""Entry of the allowed hosts or origins that allows all."""

_PREFLIGHT_SECONDS = 600  # seconds for which browsers cache the preflight response


class OriginMiddleware(HttpMiddleware):
    """Refuses unknown hosts and origins, and adds CORS headers for allowed ones."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_refusal: Callable[[int], None]) -> None:
        super().__init__(app, on_refusal)
        self._hosts = settings.allowed_hosts
        self._origins = settings.cors_origins

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        granted = self._granted(headers.get("origin"))
        if granted is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight_response(granted, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, _with_cors(send, granted))

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts is not None and not _is_allowed_host(host, self._hosts):
            return ApiError(
                403,
                f"this server does not serve the host {host[:64]!r}; allow it with --allowed-hosts",
                code="host_not_allowed",
            )
        for origin in headers.getlist("origin"):
            if self._granted(origin) is None and not _is_same_origin(origin, host):
                return ApiError(
                    403,
                    f"web pages of {origin[:64]!r} may not use this server; allow them with --cors-origins",
                    code="origin_not_allowed",
                )
        return None

    def _granted(self, origin: str | None) -> str | None:
        """Return the Access-Control-Allow-Origin value for this origin; None: not granted."""
        if origin is None:
            return None
        if ANY in self._origins:
            return ANY
        return origin if origin.lower() in self._origins else None


def _is_allowed_host(host: str, allowed: Sequence[str]) -> bool:
    """Whether a host is configured, or is a loopback name: an attacker's DNS cannot change its address."""
    name = host_name(host)
    return ANY in allowed or name in allowed or is_loopback(name)


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether an origin is this server, under the name in the `Host` header."""
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _preflight_response(granted: str, headers: Headers) -> Response:
    """Return the response to a CORS preflight request; `granted` is the value of Access-Control-Allow-Origin."""
    requested = headers.get("access-control-request-headers", "authorization, content-type")
    response_headers = {
        "Access-Control-Allow-Origin": granted,
        "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
        "Access-Control-Allow-Headers": requested,
        "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        "Vary": "Origin, Access-Control-Request-Headers",
    }
    if headers.get("access-control-request-private-network") == "true":
        response_headers["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=response_headers)


def _with_cors(send: Send, granted: str) -> Send:
    """Return `send` with the CORS headers of an allowed origin added to the response."""

    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = granted
            headers["Access-Control-Expose-Headers"] = "Retry-After, X-Request-Id, X-Foreword-Ignored-Fields"
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_cors


log = logging.getLogger("foreword.access")

REQUEST_ID = "X-Request-Id"
IGNORED_FIELDS = "X-Foreword-Ignored-Fields"
BROKEN, ABORTED = "broken", "aborted"
"""Logged and counted instead of the status of an incomplete answer. Broken: the engine or target failed; aborted: the
client disconnected."""

_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")  # without characters that could forge a log line


def mark_broken(scope: Scope) -> None:
    """Record that the access log has to show `BROKEN` for this request."""
    scope["state"][BROKEN] = True


class RequestLogMiddleware(HttpMiddleware):
    """Adds the request id (given or new) and the names of ignored fields to responses, and logs requests."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        super().__init__(app)
        self._logs = settings.access_log

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _SAFE_ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status, size, is_complete, began = 0, 0, False, monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status, size, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if ignored := scope["state"].get("ignored_fields"):
                    headers[IGNORED_FIELDS] = ignored
            else:
                size += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._logs:
                client, *_ = scope.get("client") or ("-",)
                ms = 1e3 * (monotonic() - began)
                # The query is not logged, since it may contain a secret.
                target = f"{scope['method']} {quote(scope['path'])}"
                code = str(status) if is_complete else ABORTED
                if scope["state"].get(BROKEN):
                    code = BROKEN
                log.info("%s %s %s %d bytes %.1f ms %s", client, target, code, size, ms, request_id)
