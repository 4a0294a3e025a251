"""Files that hold what one of our commands printed with --json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from foreword.errors import RequestError

_Found = TypeVar("_Found")


def read_output(option: str, path: Path, command: str, understand: Callable[[Any], _Found]) -> _Found:
    """What a file says, with or without the table before it; a `ValueError` of `understand` is told in one line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} {path} cannot be read: {error}") from None
    try:
        return understand(_last_object(text))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise RequestError(f"{option} {path} is not the output of `{command}`") from None


def _last_object(text: str) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return json.loads(text.strip().rpartition("\n")[2])
