"""Error responses, in the format of the API to which the route belongs."""

import logging
import re
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import EngineUnavailable, ForewordError, RequestError, TokenizerError

log = logging.getLogger("foreword.server")

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_ANTHROPIC_TYPES = {
    **_TYPES,
    403: "permission_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


ANTHROPIC, RESPONSES, OLLAMA = "/v1/messages", "/v1/responses", "/api/"
"""Path prefixes of these APIs."""


class ApiError(ForewordError):
    """An error response: status, message, and the parameter at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self, path: str = "") -> dict[str, object]:
        """Return the error in the format of the path's API; OpenAI's by default."""
        if path.startswith(OLLAMA):
            return {"error": self._named}
        if path.startswith(ANTHROPIC):
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self._named}}
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def _named(self) -> str:
        """The message with the name of the parameter, for formats without a `param`."""
        message = str(self)
        return message if self.param is None or self.param in message else f"{self.param}: {message}"

    def renamed(self, field_names: Mapping[str, str]) -> "ApiError":
        """Return the error with another API's name of the parameter, also in the message.

        `field_names` maps paths of this server's fields to paths of the other API's. A parent's entry also applies to
        the fields in it; the longest matching path is used.
        """
        param = self.param or ""
        matching = [path for path in field_names if f"{param}.".startswith(f"{path}.")]
        if not matching:
            return self
        longest = max(matching, key=len)
        name = field_names[longest] + param.removeprefix(longest)
        message = re.sub(rf"(?<![\w.]){re.escape(param)}(?!\w)", lambda _: name, str(self))
        return ApiError(self.status, message, param=name, code=self.code, retry_after=self.retry_after)

    def response(self, path: str = "") -> Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(msgspec.json.encode(self.body(path)), self.status, headers, "application/json")


def as_api_error(error: Exception, request_id: str = "") -> ApiError:
    """Convert an exception to an error response; log an unexpected one, which becomes status 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineUnavailable):
        return ApiError(503, str(error), code="engine_unavailable", retry_after=1)
    if isinstance(error, RequestError | TokenizerError):
        return ApiError(400, str(error))
    log.error("a request failed%s", f": {request_id}" if request_id else "", exc_info=error)
    return ApiError(500, "the server failed to answer this request; its log says why")


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    method, path = request.method, request.url.path[:64]
    if error.status_code == 404:
        return ApiError(404, f"there is no route {method} {path}; /openapi.json lists the routes")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ApiError(405, f"{path} does not take {method}; use {allowed}")
    return ApiError(error.status_code, str(error.detail))


ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]


def install_error_handlers(app: FastAPI, on_error: Callable[[int], None]) -> None:
    """Respond to every error in the format of its API; `on_error` receives each status."""

    async def respond(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            api_error = _routing_error(request, error)
        else:
            api_error = as_api_error(error, getattr(request.state, "request_id", ""))
        on_error(api_error.status)
        return api_error.response(request.url.path)

    handler: ErrorHandler = respond
    for error_type in (ForewordError, HTTPException):
        app.add_exception_handler(error_type, handler)
    app.add_middleware(UnexpectedErrors, respond=handler)


class UnexpectedErrors:
    """Middleware that responds to exceptions without a handler.

    A handler for `Exception` would not suffice: Starlette raises the exception again after calling it, and uvicorn then
    closes the connection before the client's next request.
    """

    def __init__(self, app: ASGIApp, respond: ErrorHandler) -> None:
        self._app, self._respond = app, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; respond to an exception unless a response has begun."""
        has_begun = False

        async def tracked_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, tracked_send)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            response = await self._respond(Request(scope), error)
            await response(scope, receive, send)
