"""The prompt of `foreword generate` (argument, file or pipe) and its structured-output options."""

import select
import stat
import sys
from dataclasses import dataclass
from os import fstat
from pathlib import Path
from typing import TYPE_CHECKING

from foreword.cli.console import stderr
from foreword.cli.options.common import read_text
from foreword.cli.options.grouped import option
from foreword.errors import RequestError

_PATIENCE = 2.0
"""Seconds until a message that the command waits for a pipe, so that it does not look hung."""


def read_prompt(prompt: str | None, file: Path | None, stdin_is_free: bool = True) -> str:
    """Return the prompt after piped text; a final line end of a file or pipe is removed."""
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
    """Return text from a pipe or redirected file; empty for a terminal, socket or /dev/null."""
    try:
        kind = fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or not a file
        return ""
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)):
        return ""
    if not select.select([sys.stdin], [], [], _PATIENCE)[0]:
        stderr.print("[dim]waiting for standard input to end (</dev/null: there is none) ...[/dim]")
    return _text_of(Path("-"))


def _text_of(path: Path) -> str:
    return read_text(path).removesuffix("\n")


if TYPE_CHECKING:
    from foreword.structured.params import StructuredOutputs


@dataclass(frozen=True)
class StructuredOptions:
    """Response format; at most one is given."""

    json_schema: Path | None = option(
        None, "Constrain the answer to JSON that matches the schema in this file.", metavar="FILE"
    )
    regex: str | None = option(
        None,
        r"Constrain the answer to this regular expression; \d, \w, \s are ASCII unless it starts with (?u).",
    )
    choice: list[str] | None = option(None, "Constrain the answer to one of these texts; repeatable.")
    grammar: str | None = option(
        None, "Constrain the answer to this grammar: llama.cpp's GBNF, or Lark.", metavar="FILE|TEXT"
    )

    def outputs(self) -> "StructuredOutputs | None":
        """Return the structured output that the options specify; None: free text."""
        from foreword.structured.params import StructuredOutputs

        given = {
            "--json-schema": self.json_schema,
            "--regex": self.regex,
            "--choice": self.choice or None,
            "--grammar": self.grammar,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise RequestError(f"{' and '.join(named)} exclude each other; give one")
        if self.json_schema is not None:
            return _of_schema(self.json_schema)
        if self.regex is not None:
            return StructuredOutputs(regex=self.regex)
        if self.choice:
            return StructuredOutputs(choice=self.choice)
        if self.grammar is not None:
            return StructuredOutputs(grammar=_grammar_text(self.grammar))
        return None


def _of_schema(file: Path) -> "StructuredOutputs":
    from foreword.structured.params import StructuredOutputs

    try:
        return StructuredOutputs(json=read_text(file))
    except RequestError as error:
        reason = str(error).removeprefix("structured outputs: json ")
        raise RequestError(reason if reason == str(error) else f"--json-schema {file} {reason}") from None


def _grammar_text(grammar: str) -> str:
    """Return a grammar given as text or as a file; no grammar is also a file name."""
    return grammar if "::=" in grammar or "start:" in grammar else read_text(Path(grammar))
