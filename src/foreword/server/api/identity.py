"""Request ids, and the caller of a request."""

import secrets
from dataclasses import dataclass

from starlette.requests import Request


@dataclass(frozen=True)
class ApiCaller:
    """The sender of a request."""

    tenant: str  # hash of the API key; empty if the server has none
    trusted: bool  # gave a valid key, or none is needed
    is_admin: bool = False  # gave an admin key


def caller_of(request: Request) -> ApiCaller:
    """Return the caller that `AuthMiddleware` found for a request."""
    caller: ApiCaller = request.state.caller
    return caller


def new_id(prefix: str) -> str:
    """Return an id that is unique and unpredictable."""
    return f"{prefix}-{secrets.token_hex(16)}"
