"""Names of requests, and who sent them."""

import secrets
from dataclasses import dataclass

from starlette.requests import Request


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    tenant: str  # hash of the API key; empty if the server has none
    trusted: bool  # gave a key, or none is needed
    is_admin: bool = False  # gave an admin key


def caller_of(request: Request) -> Caller:
    """What `AuthMiddleware` noted about a request."""
    caller: Caller = request.state.caller
    return caller


def new_id(prefix: str) -> str:
    """An id that no other request has, and nobody can guess."""
    return f"{prefix}-{secrets.token_hex(16)}"
