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
    """Base class: non-HTTP scopes pass through; errors returned by `_refusal` are sent here."""

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

    tenant: str  # hash of the API key; empty if the server has none
    trusted: bool  # gave a valid key, or none is needed
    is_admin: bool = False  # gave an admin key


def caller_of(request: Request) -> ApiCaller:
    caller: ApiCaller = request.state.caller
    return caller


class AuthMiddleware(HttpMiddleware):
    """Refuses long headers and unknown keys, and stores the `ApiCaller` in the request's state."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_refusal: Callable[[int], None]) -> None:
        super().__init__(app, on_refusal)
        self._header_bytes = settings.limits.header_bytes
        self._anyone = None if settings.api_keys else ApiCaller("", trusted=True)
        self._callers = {
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
        """Return the owner of the key; None if unknown. Every key is compared with all known ones."""
        found = self._anyone
        for key in given_keys(headers):
            given = _digest(key)
            for known, caller in self._callers.items():
                if hmac.compare_digest(known, given):
                    found = caller
        return found


def given_keys(headers: Headers) -> list[str]:
    """Return the keys in a request; the last known one counts."""
    scheme, _, bearer = _utf8(headers.get("authorization", "")).partition(" ")
    found = (_utf8(headers.get("x-api-key", "")), bearer if scheme.lower() == "bearer" else "")
    return [key.strip() for key in found if key.strip()]


def _utf8(header: str) -> str:
    """Decode a header as UTF-8 that was read as latin-1."""
    return header.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


class HeadMiddleware(HttpMiddleware):
    """Lets routes handle HEAD as GET; the web server omits the body."""

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)


ANY = "*"
_PREFLIGHT_SECONDS = 600  # browser cache time of the preflight


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
            await _preflight(granted, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, _with_cors(send, granted))

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts is not None and not _is_allowed_host(host, self._hosts):
            return ApiError(
                403,
                f"this server is not {host[:64]!r}; name it with --allowed-hosts",
                code="host_not_allowed",
            )
        for origin in headers.getlist("origin"):
            if self._granted(origin) is None and not _is_same(origin, host):
                return ApiError(
                    403,
                    f"pages of {origin[:64]!r} may not use this server; name them with --cors-origins",
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
    """Whether a host is configured, or is this machine under a name that no web page can redirect."""
    name = host_name(host)
    return ANY in allowed or name in allowed or is_loopback(name)


def _is_same(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False


def _preflight(granted: str, headers: Headers) -> Response:
    reported = {
        "Access-Control-Allow-Origin": granted,
        "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
        "Access-Control-Allow-Headers": headers.get(
            "access-control-request-headers", "authorization, content-type"
        ),
        "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        "Vary": "Origin, Access-Control-Request-Headers",
    }
    if headers.get("access-control-request-private-network") == "true":
        reported["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=reported)


def _with_cors(send: Send, granted: str) -> Send:
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
"""Logged and counted instead of a status that was sent before the answer was complete: its source failed, or
the client disconnected."""

_USABLE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")  # no characters that could forge a log line


def mark_broken(scope: Scope) -> None:
    scope["state"][BROKEN] = True


class RequestLogMiddleware(HttpMiddleware):
    """Handles `X-Request-Id` (given or new), the access log, and the header that names ignored fields."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        super().__init__(app)
        self._logs = settings.access_log

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _USABLE.fullmatch(given) else f"req-{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status, size, is_whole, began = 0, 0, False, monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status, size, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if ignored := scope["state"].get("ignored_fields"):
                    headers[IGNORED_FIELDS] = ignored
            else:
                size += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._logs:
                client = (scope.get("client") or ("-",))[0]
                ms = 1e3 * (monotonic() - began)
                # Without the query, which may contain a secret.
                target = f"{scope['method']} {quote(scope['path'])}"
                sent = str(status) if is_whole else ABORTED
                code = BROKEN if scope["state"].get(BROKEN) else sent
                log.info("%s %s %s %d bytes %.1f ms %s", client, target, code, size, ms, request_id)
