"""Every request has an id, and a line in the log if that is wanted."""

import logging
import re
import secrets
from time import monotonic
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.server.settings import ServerSettings

log = logging.getLogger("foreword.access")

REQUEST_ID = "X-Request-Id"
IGNORED_FIELDS = "X-Foreword-Ignored-Fields"
BROKEN, ABORTED = "broken", "aborted"
"""Logged and counted in place of a status that was sent before the answer was whole: the source of the answer broke
off, or the client left."""

_USABLE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")  # nothing that could forge a line of the log


def mark_broken(scope: Scope) -> None:
    """Note that the answer to this request broke off after its status was sent."""
    scope["state"][BROKEN] = True


class RequestLogMiddleware:
    """ASGI middleware: `X-Request-Id` as given or fresh, in the request's state, the answer and the access log.

    It also adds the header that names the fields of the body that were ignored.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._logs = settings.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and note how it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
                # Without the query, which may hold a secret.
                target = f"{scope['method']} {quote(scope['path'])}"
                sent = str(status) if is_whole else ABORTED
                code = BROKEN if scope["state"].get(BROKEN) else sent
                log.info("%s %s %s %d bytes %.1f ms %s", client, target, code, size, ms, request_id)
