"""Where the prompt of `foreword generate` comes from: an argument, a file, a pipe, or two of them."""

import select
import stat
import sys
from os import fstat
from pathlib import Path

from foreword.cli.console import stderr
from foreword.cli.options.common import read_text
from foreword.errors import RequestError

_PATIENCE = 2.0
"""Seconds until a line says that the command waits for a pipe: one that is never closed would look like a hang."""


def read_prompt(prompt: str | None, file: Path | None, stdin_is_free: bool = True) -> str:
    """The question, after what is piped in beside it; a final line end of a file or a pipe is not part of it."""
    if prompt is not None and file is not None:
        raise RequestError("there is a prompt and a --file; give one")
    if prompt == "-" or file == Path("-") or (prompt is None and file is None):
        if not stdin_is_free:
            raise RequestError(
                "standard input cannot be both the prompt and the --prediction; give one a file"
            )
        return _from_stdin(must_be_piped=prompt is None and file is None)
    question = prompt if file is None else _text_of(file)
    if not question:
        raise RequestError(f"{file or 'the prompt'} is empty")
    context = _piped_text() if stdin_is_free else ""
    return f"{context}\n\n{question}" if context else question


def _from_stdin(must_be_piped: bool) -> str:
    if must_be_piped and sys.stdin.isatty():
        raise RequestError(
            'there is no prompt; give one: foreword generate "Why is the sky blue?", --file, or a pipe'
        )
    read = _text_of(Path("-"))
    if not read:
        raise RequestError("standard input is empty; pipe a prompt in or give one")
    return read


def _piped_text() -> str:
    """What a pipe or a redirected file brings; a terminal, a socket and /dev/null bring nothing."""
    try:
        kind = fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or replaced by something that is no file
        return ""
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)):
        return ""
    if not select.select([sys.stdin], [], [], _PATIENCE)[0]:
        stderr.print("[dim]waiting for standard input to end (</dev/null: there is none) ...[/dim]")
    return _text_of(Path("-"))


def _text_of(path: Path) -> str:
    return read_text(path).removesuffix("\n")
