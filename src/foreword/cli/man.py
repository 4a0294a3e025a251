"""`foreword man`: manual pages generated from the help texts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword import __version__
from foreword.cli.console import say
from foreword.errors import RequestError
from foreword.paths import user_path


def man(
    ctx: typer.Context,
    directory: Annotated[Path, typer.Argument(help="Folder for the pages, such as ~/.local/share/man/man1.")],
) -> None:
    """Write a manual page for every command: foreword.1, foreword-serve.1 and so on."""
    directory = user_path(directory)
    pages = dict(_pages(ctx.find_root().command, None, "foreword"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (directory / f"{name}.1").write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{directory} cannot be written: {error.strerror}") from None
    first = directory / "foreword.1"
    say(f"{len(pages)} pages in {directory}; read one with: man -l {first}")


def _pages(command: Any, parent: Any, path: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - typer's own click's
    """Yield (name, text) of the page of a command and of its subcommands."""
    context = command.make_context(path, [], parent=parent, resilient_parsing=True)
    yield path.replace(" ", "-"), _page(command, context, path)
    for name, subcommand in getattr(command, "commands", {}).items():
        if not subcommand.hidden:
            yield from _pages(subcommand, context, f"{path} {name}")


def _page(command: Any, context: Any, path: str) -> str:  # noqa: ANN401
    """Return a command's page in troff's format."""
    name, subcommands = path.replace(" ", "-"), getattr(command, "commands", {}).values()
    options = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
    commands = [(subcommand.name, subcommand.get_short_help_str(200)) for subcommand in subcommands]
    lines = [
        f'.TH "{name.upper()}" "1" "" "foreword {__version__}" "Foreword"',
        ".SH NAME",
        f"{_text(name)} \\- {_text(command.get_short_help_str(200))}",
        ".SH SYNOPSIS",
        f".B {_text(path)}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        _text(command.help or ""),
    ]
    for title, entries in (("OPTIONS", options), ("COMMANDS", commands)):
        if entries:
            lines.append(f".SH {title}")
        for term, meaning in entries:
            lines += [".TP", f".B {_text(term)}", _text(meaning)]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Return the text escaped for troff; an empty line begins a paragraph."""
    lines = []
    for line in text.replace("\\", "\\e").replace("-", "\\-").strip().splitlines():
        stripped = line.strip()
        if not stripped:
            lines.append(".PP")
        else:  # a line that begins with . or ' would be a request
            lines.append(f"\\&{stripped}" if stripped[0] in ".'" else stripped)
    return "\n".join(lines)
