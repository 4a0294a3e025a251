"""Which web pages may use this server: none but its own, unless they are named.

A browser lets any page send requests to any address. Without these checks a page could drive a server on the
visitor's machine, by a plain POST or by pointing a name of its own at 127.0.0.1 (DNS rebinding).
"""

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.server.address import host_name, is_loopback
from foreword.server.errors import ApiError
from foreword.server.settings import ServerSettings

ANY = "*"
_PREFLIGHT_SECONDS = 600  # how long a browser may remember what it was told


class OriginMiddleware:
    """ASGI middleware: refuses foreign hosts and origins, and answers for the origins that may come (CORS)."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_refusal: Callable[[int], None]) -> None:
        self._app = app
        self._hosts = settings.allowed_hosts
        self._origins = settings.cors_origins
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(headers)
        if refusal is not None:
            self._on_refusal(refusal.status)
            await refusal.response()(scope, receive, send)
            return
        granted = self._granted(headers.get("origin"))
        if granted is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(granted, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, _with_cors(send, granted))

    def _refusal(self, headers: Headers) -> ApiError | None:
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
        """What Access-Control-Allow-Origin says to this origin; None: nothing."""
        if origin is None:
            return None
        if ANY in self._origins:
            return ANY
        return origin if origin.lower() in self._origins else None


def _is_allowed_host(host: str, allowed: Sequence[str]) -> bool:
    """A name that was given, or this machine by its own names, which no page can point elsewhere."""
    name = host_name(host)
    return ANY in allowed or name in allowed or is_loopback(name)


def _is_same(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False


def _preflight(granted: str, headers: Headers) -> Response:
    told = {
        "Access-Control-Allow-Origin": granted,
        "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
        "Access-Control-Allow-Headers": headers.get(
            "access-control-request-headers", "authorization, content-type"
        ),
        "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        "Vary": "Origin, Access-Control-Request-Headers",
    }
    if headers.get("access-control-request-private-network") == "true":
        told["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=told)


def _with_cors(send: Send, granted: str) -> Send:
    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = granted
            headers["Access-Control-Expose-Headers"] = "Retry-After, X-Request-Id, X-Foreword-Ignored-Fields"
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_cors
