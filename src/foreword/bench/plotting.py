"""The package that draws pictures, which is optional."""

import importlib
from pathlib import Path
from typing import Any

from foreword.errors import RequestError


def require_matplotlib() -> Any:  # noqa: ANN401 - an optional package
    """The plotting package, or a line that says how to get it."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError:
        raise RequestError(
            '--plot needs matplotlib: pip install "foreword[plot]", or pip install matplotlib'
        ) from None


def save_figure(figure: Any, path: Path) -> None:  # noqa: ANN401 - an optional package
    """Write the picture, in the format that the file's name asks for."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise RequestError(f"--plot {path} cannot be written: {error}") from None
