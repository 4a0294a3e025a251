"""`foreword pull` and `foreword models`: fetch and list models."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from foreword.cli.console import DEFAULT_MODEL, JsonOption, print_json, stage_bar, stdout
from foreword.cli.options.common import check_model


def pull(
    name: Annotated[
        str,
        typer.Argument(
            callback=check_model,
            help="Built-in name, or hub id: org/name, or org/name:file.gguf for one file of it.",
        ),
    ] = DEFAULT_MODEL,
) -> None:
    """Fetch a model into the cache and verify its checksums; a fetch that was cut off is resumed."""
    from foreword.models.sources.resolve import pull_model

    with stage_bar() as on_stage:
        path = pull_model(name, on_stage)
    stdout.print(f"{name} is ready: {path}", soft_wrap=True)


def list_models(
    supported: Annotated[
        bool, typer.Option("--supported", help="List supported model families and their backends.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List built-in models and whether they are fetched, and cached hub models."""
    if supported:
        _list_supported(as_json)
        return
    from foreword.models.sources import builtin
    from foreword.models.sources.resolve import cached_models

    entries = [*builtin.list_models(), *cached_models()]
    if as_json:
        rows = [
            {"name": e.name, "path": str(e.path), "bytes": e.bytes, "present": e.present} for e in entries
        ]
        print_json({"models": rows})
        return
    headings = ("name", "size", "fetched", "what it is", "path")
    lines = [
        (e.name, f"{e.bytes / 1e6:.0f} MB", "yes" if e.present else "no", e.description, str(e.path))
        for e in entries
    ]
    _print_table(headings, lines)
    if stdout.is_terminal:
        stdout.print("Also: a .gguf file, a Hugging Face directory, or a hub id such as org/name.")


def _list_supported(as_json: bool) -> None:
    from dataclasses import asdict

    from foreword.backends.support import BACKENDS, supported_families

    families = supported_families()
    if as_json:
        print_json({"families": [asdict(family) for family in families]})
        return
    lines = [(row.models, row.hf_class, row.formats, *row.backends.values()) for row in families]
    _print_table(("models", "class", "files", *BACKENDS), lines)


def _print_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    if not stdout.is_terminal:  # for cut and awk: no wrapping
        for line in (headings, *lines):
            print("\t".join(line))
        return
    table = Table(*headings[:-1])
    table.add_column(headings[-1], overflow="fold")
    for line in lines:
        table.add_row(*line)
    stdout.print(table)
