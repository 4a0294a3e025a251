"""API keys and admin keys: compared in constant time, before a request is read."""

import hmac
from collections.abc import Callable
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.server.api.identity import Caller
from foreword.server.errors import ApiError
from foreword.server.page.files import PAGE_PATHS
from foreword.server.settings import ServerSettings, tenant_of

OPEN_PATHS = frozenset({"/health", "/ready"}) | PAGE_PATHS
"""Routes that answer without a key."""


class AuthMiddleware:
    """ASGI middleware: refuses long headers and unknown keys, and notes who sent a request.

    Puts the `Caller` into the request's state, for `caller_of`.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_refusal: Callable[[int], None]) -> None:
        self._app = app
        self._on_refusal = on_refusal
        self._header_bytes = settings.limits.header_bytes
        self._anyone = None if settings.api_keys else Caller("", trusted=True)
        self._callers = {
            _digest(key): Caller(tenant_of(key), trusted=True, is_admin=key in settings.admin_keys)
            for key in (*settings.api_keys, *settings.admin_keys)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            self._on_refusal(refusal.status)
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._header_bytes:
            return ApiError(431, f"the request's headers are longer than {self._header_bytes} bytes")
        caller = self._caller(Headers(scope=scope))
        scope.setdefault("state", {})["caller"] = caller or Caller("", trusted=False)
        if caller is None and scope["path"] not in OPEN_PATHS:
            return ApiError(
                401,
                "give this server's API key: Authorization: Bearer KEY, or X-API-Key: KEY",
                code="invalid_api_key",
            )
        return None

    def _caller(self, headers: Headers) -> Caller | None:
        """The owner of the key; None if it is unknown. Every key is compared with all that are known."""
        found = self._anyone
        for key in given_keys(headers):
            given = _digest(key)
            for known, caller in self._callers.items():
                if hmac.compare_digest(known, given):
                    found = caller
        return found


def given_keys(headers: Headers) -> list[str]:
    """The keys that a request carries; the last one that is known counts."""
    scheme, _, bearer = _utf8(headers.get("authorization", "")).partition(" ")
    found = (_utf8(headers.get("x-api-key", "")), bearer if scheme.lower() == "bearer" else "")
    return [key.strip() for key in found if key.strip()]


def _utf8(header: str) -> str:
    """Headers are read as latin-1; a key beyond it is sent as UTF-8."""
    return header.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
