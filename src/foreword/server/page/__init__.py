"""The playground page at `/`: static files, and the server's settings that it needs."""

from functools import partial
from importlib.resources import files
from pathlib import PurePath
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from foreword.drafters.registry import drafter_kinds
from foreword.server.context import ServerContext

_FOLDER: Final = files("foreword.server.page") / "static"

FILES: Final = {
    "/" if entry.name == "index.html" else f"/page/{entry.name}": entry for entry in _FOLDER.iterdir()
}
"""Static files by path."""

PAGE_PATHS: Final = frozenset(FILES)
"""Paths that need no API key, since static files have no data of the server."""

_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes(context: ServerContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, entry in FILES.items():
        send = partial(_send, entry.read_bytes(), _MEDIA_TYPES[PurePath(entry.name).suffix])
        router.add_api_route(path, send, methods=["GET"], response_model=None)

    @router.get("/page/settings")
    async def settings() -> Response:
        """Return the settings that the page's form offers."""
        return await _send(msgspec.json.encode(_settings(context)), "application/json")

    return router


async def _send(content: bytes, media_type: str) -> Response:
    return Response(content, headers=_HEADERS, media_type=media_type)


def _settings(context: ServerContext) -> dict[str, object]:
    settings, kinds = context.settings, drafter_kinds()
    return {
        "model": settings.model_name,
        # Without drafters that follow a grammar or a prediction, which the page's requests do not have.
        "methods": sorted(name for name in settings.methods if not kinds[name].traits.follows),
        "default_method": settings.default_method,
        "shows_speculation": settings.show_speculation,
        "max_model_len": context.engine.max_model_len,
    }
