"""Paths as users write them."""

import os
from pathlib import Path


def user_path(path: str | Path) -> Path:
    """Return the path with the home folder for `~`; an unknown user's, such as `~nobody/x`, stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises RuntimeError for unknown users
