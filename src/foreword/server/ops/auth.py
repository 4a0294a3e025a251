"""Who is asking: API keys, compared in constant time, before anything of the request is looked at."""

import hmac
from collections.abc import Callable
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.server.errors import ApiError
from foreword.server.page.files import PAGE_PATHS
from foreword.server.settings import ServerSettings, tenant_of

OPEN_PATHS = frozenset({"/health", "/ready"}) | PAGE_PATHS
"""Routes that answer without a key."""


class AuthMiddleware:
    """ASGI middleware: refuses long headers and unknown keys, and notes whose request it is.

    Puts `tenant` (a hash of the key; empty without keys) and `trusted` into the request's state.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_refusal: Callable[[int], None]) -> None:
        self._app = app
        self._on_refusal = on_refusal
        self._header_bytes = settings.limits.header_bytes
        self._tenants = {_digest(key): tenant_of(key) for key in settings.api_keys}

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
        # Headers are read as latin-1; a key beyond it is sent as UTF-8.
        header = Headers(scope=scope).get("authorization", "").encode("latin-1", "replace")
        tenant = self._tenant(header.decode("utf-8", "surrogateescape"))
        state = scope.setdefault("state", {})
        state["tenant"] = tenant or ""
        state["trusted"] = tenant is not None
        if tenant is None and scope["path"] not in OPEN_PATHS:
            return ApiError(
                401, "give this server's API key: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return None

    def _tenant(self, header: str) -> str | None:
        """The tenant that the key belongs to; None if it opens nothing. Always compares with every key."""
        if not self._tenants:
            return ""
        scheme, _, key = header.partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, given):
                found = tenant
        return found


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
