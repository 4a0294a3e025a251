"""Calls of a running server by the commands that watch and operate it."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Annotated, Any

import typer

from foreword.cli.options.serve import client_key
from foreword.errors import RequestError

UrlOption = Annotated[str, typer.Option(help="Address of a `foreword serve`.")]
KeyOption = Annotated[str | None, typer.Option(help="Key. Default: FOREWORD_API_KEY.", show_default=False)]
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_SECONDS = 10.0

_REASONS = {  # HTTP status: what it means, or what to do
    401: "give its API key with --api-key",
    403: "it needs an admin key, with --admin-key",
    503: "its engine is not ready",
}


class ServerRefusal(RequestError):  # noqa: N818 - reads as what is the case
    """A server answers with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def call_server(
    url: str,
    path: str,
    api_key: str | None,
    *,
    method: str = "GET",
    body: object = None,
    reasons: Mapping[int, str] = {},
) -> Any:  # noqa: ANN401 - any JSON
    """Return a server's JSON answer; raise `RequestError` on failure.

    `reasons` has what statuses mean on this route; for others the server's message is shown.
    """
    if not url.startswith(("http://", "https://")):
        raise RequestError(f"--url must be an http address, not {url!r}")
    key = client_key(api_key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    data = None if body is None else json.dumps(body).encode()
    address = f"{url.rstrip('/').removesuffix('/v1')}{path}"
    request = urllib.request.Request(address, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        reason = {**_REASONS, **reasons}.get(error.code) or _message(error)
        raise ServerRefusal(f"{url} answers {error.code}: {reason}", error.code) from None
    except (OSError, ValueError, HTTPException) as error:
        cause = getattr(error, "reason", None) or error
        raise RequestError(f"{url} cannot be reached: {cause}; start `foreword serve` there") from None


def _message(error: urllib.error.HTTPError) -> str:
    """Return the message of an error response."""
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return "an unexpected status"
