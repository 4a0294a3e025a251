"""The static files of the page at `/`."""

from importlib.resources import files
from typing import Final

_FOLDER: Final = files("foreword.server.page") / "static"

FILES: Final = {
    "/" if entry.name == "index.html" else f"/page/{entry.name}": entry for entry in _FOLDER.iterdir()
}

PAGE_PATHS: Final = frozenset(FILES)
"""Paths that need no key: static files without server data."""
