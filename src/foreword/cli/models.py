"""`foreword pull` and `foreword models`: get models and see what is there."""

from typing import Annotated

import typer
from rich.table import Table

from foreword.cli.console import DEFAULT_MODEL, JsonOption, print_json, stage_bar, stdout


def pull(
    name: Annotated[str, typer.Argument(help="Built-in name.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a built-in model into the cache, or check the copy that is there."""
    from foreword.models.sources import builtin

    with stage_bar() as on_stage:
        path = builtin.pull(name, on_stage)
    stdout.print(f"{name} is ready: {path}", soft_wrap=True)


def list_models(as_json: JsonOption = False) -> None:
    """List the built-in models and whether they have been fetched."""
    from foreword.models.sources import builtin

    entries = builtin.list_models()
    if as_json:
        rows = [
            {"name": e.name, "path": str(e.path), "bytes": e.bytes, "present": e.present} for e in entries
        ]
        print_json({"models": rows})
        return
    table = Table("name", "size", "fetched", "what it is", "path")
    for entry in entries:
        size = f"{entry.bytes / 1e6:.0f} MB"
        table.add_row(entry.name, size, "yes" if entry.present else "no", entry.description, str(entry.path))
    stdout.print(table)
    stdout.print("Also: a .gguf file, a Hugging Face directory, or a hub id such as org/name.")
