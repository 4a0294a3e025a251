"""Options, checks and inputs that many commands share. Nothing heavy is imported."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.cli.console import print_json, say, stdout
from foreword.cli.options.grouped import Command, late, option
from foreword.errors import RequestError


def leave_stdout_to_json(as_json: bool) -> bool:
    """Send tables to standard error if standard output is for JSON; return the value of --json."""
    stdout.stderr = as_json
    return as_json


JsonOption = Annotated[
    bool,
    typer.Option("--json", callback=leave_stdout_to_json, help="Print JSON; tables go to standard error."),
]


@dataclass(frozen=True, kw_only=True)
class JsonCommand(Command):
    """A command with --json."""

    as_json: JsonOption = late(False, 3)

    def show_json(self, value: dict[str, Any]) -> None:
        """Print the value if --json was given."""
        if self.as_json:
            print_json(value)


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return the option's value; raise `RequestError` if it is not allowed."""
    if value not in allowed:
        raise RequestError(f"{option} must be {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}")
    return value


def json_object(option: str, text: str, example: str | None = None) -> dict[str, Any]:
    """Return the option's JSON object; raise `RequestError` for other JSON, with an example if one is given."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{option} is not JSON: {error}") from None
    if not isinstance(value, dict):
        advice = "" if example is None else f" such as {example}"
        raise RequestError(f"{option} must be a JSON object{advice}")
    return value


def split_list(text: str | None) -> list[str]:
    """Return the entries of a list with commas."""
    return [entry.strip() for entry in (text or "").split(",") if entry.strip()]


def read_bytes(path: Path) -> bytes:
    """Return a file's bytes; `-` is standard input."""
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Return a file's text; `-` is standard input."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        return text.removeprefix("\ufeff")  # byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(f"{path} cannot be read: {reason}") from None


def parse_sizes(option: str, text: str, least: int | None = None) -> list[int]:
    """Parse whole numbers separated by commas; `least` is the smallest allowed number."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(f"{option} takes numbers separated by commas, not {text!r}") from error
    if least is not None and min(sizes) < least:
        raise RequestError(f"{option} takes numbers from {least} on")
    return sizes


def check_output(option: str, path: Path) -> None:
    """Raise `RequestError` before a long run if its file cannot be written: no directory has it, or it is one."""
    if not path.parent.is_dir():
        raise RequestError(f"{option} {path} cannot be written: there is no directory {path.parent}")
    if path.is_dir():
        raise RequestError(f"{option} {path} cannot be written: it is a directory")


def check_plot(path: Path | None) -> Path | None:
    """Return the plot's path; raise `RequestError` before a long run if the plot cannot be written."""
    if path is not None:
        from foreword.bench.pictures import require_matplotlib

        require_matplotlib()
        check_output("--plot", path)
    return path


def plot_option(text: str = "Draw the curves into this PNG file.") -> Any:  # noqa: ANN401
    return option(None, text, callback=check_plot, last=1)


def save_plot(plot: Path | None, picture: Callable[[Path], None]) -> None:
    """Draw the picture, if requested, and print its path."""
    if plot is not None:
        picture(plot)
        say(f"plot: {plot}")
