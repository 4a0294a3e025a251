"""Asks a server for its report."""

import json
import os
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.control.reporting.figures import ControlReport

UrlOption = Annotated[str, typer.Option(help="Address of a `foreword serve`.")]
KeyOption = Annotated[
    str | None,
    typer.Option(help="API key of the server. Default: the first of FOREWORD_API_KEY.", show_default=False),
]

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_SECONDS = 10.0


def ask_report(url: str, api_key: str | None) -> "ControlReport":
    """The report of a server; `RequestError` says in one line why there is none."""
    from foreword.control.reporting.reading import from_json

    if not url.startswith(("http://", "https://")):
        raise RequestError(f"--url must be an http address, not {url!r}")
    key = api_key or os.environ.get("FOREWORD_API_KEY", "").split(",")[0]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/').removesuffix('/v1')}/speculation", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return from_json(json.load(answer))
    except urllib.error.HTTPError as error:
        raise RequestError(f"{url} answers {error.code}: {_reason(error.code)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise RequestError(f"{url} cannot be asked: {reason}; is `foreword serve` running there?") from None


def _reason(status: int) -> str:
    return {
        401: "give its API key with --api-key",
        404: "it tells nothing about speculation (--hide-speculation, or an older version)",
        503: "its engine is not ready",
    }.get(status, "something is wrong there")
