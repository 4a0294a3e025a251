"""Errors as OpenAI's clients expect them."""

import logging
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong, in OpenAI's fields."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """A whole answer that is an error."""

    error: ErrorBody


class ApiError(ForewordError):
    """An answer that is an error: status, one line, and which parameter is to blame."""

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

    def body(self) -> ErrorAnswer:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return ErrorAnswer(ErrorBody(str(self), kind, self.param, self.code))

    def response(self) -> Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(msgspec.json.encode(self.body()), self.status, headers, "application/json")


def as_api_error(error: Exception, request_id: str = "") -> ApiError:
    """Return the answer to an exception; an unexpected one is logged, and the client gets no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineUnavailable):
        return ApiError(503, str(error), code="engine_unavailable", retry_after=1)
    if isinstance(error, RequestError | TokenizerError):
        return ApiError(400, str(error))
    log.error("a request failed%s", f": {request_id}" if request_id else "", exc_info=error)
    return ApiError(500, "the server failed to answer this request; its log says why")


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    """What the framework refuses: there is no such route, or not for this method."""
    asked, path = request.method, request.url.path[:64]
    if error.status_code == 404:
        return ApiError(404, f"there is no route {asked} {path}; /openapi.json lists those that there are")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ApiError(405, f"{path} does not take {asked}; use {allowed}")
    return ApiError(error.status_code, str(error.detail))


def install_error_handlers(app: FastAPI, on_error: Callable[[int], None]) -> None:
    """Make every error of the app OpenAI-shaped; `on_error` is called with each status."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            known = _routing_error(request, error)
        else:
            known = as_api_error(error, getattr(request.state, "request_id", ""))
        on_error(known.status)
        return known.response()

    handler: Callable[[Request, Exception], Awaitable[Response]] = answer
    for kind in (ForewordError, HTTPException, Exception):
        app.add_exception_handler(kind, handler)
