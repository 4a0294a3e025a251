"""`foreword datastore`: datastores of the drafter `rest`."""

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.console import print_json, progress_bar, say, stage_bar
from foreword.cli.options.common import JsonOption
from foreword.cli.options.model import DEFAULT_MODEL, ModelOption

app = typer.Typer(no_args_is_help=True, help="Build datastores of the drafter rest.")


@app.command()
def build(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 texts, or token ids as .npy or .bin.")],
    out: Annotated[Path, typer.Option(help="Datastore to write, a new file.")],
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
) -> None:
    """Build a datastore from texts or token ids, for models with this model's tokenizer.

    Example: foreword datastore build docs/*.md --out docs.store
    """
    from foreword.drafters.datastore.build import build as write_store
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.sources.resolve import resolve_model

    with stage_bar() as on_stage:
        tokenizer = open_checkpoint(resolve_model(model, on_progress=on_stage)).tokenizer()
        header = write_store(files, out, tokenizer, model, on_stage)
    if as_json:
        counts = {"tokens": header.tokens, "files": header.files, "bytes": header.file_bytes}
        print_json({"out": str(out), **counts})
        return
    say(f"{out}: {header.tokens:,} tokens of {header.files} files, {header.file_bytes / 1e6:.1f} MB")


@app.command()
def show(file: Annotated[Path, typer.Argument(help="Datastore.")], as_json: JsonOption = False) -> None:
    """Show the contents of a datastore, and verify its checksum."""
    from foreword.drafters.datastore.format import read_header, verify

    header = read_header(file)
    with progress_bar(f"checking {file}") as on_progress:
        verify(file, header, on_progress)
    if as_json:
        fields = ("tokens", "shards", "file_bytes", "model", "vocab_size", "tokenizer", "files", "sources")
        about = {name.removeprefix("file_"): getattr(header, name) for name in fields}
        print_json({"file": str(file), **about})
        return
    shards = "1 shard" if header.shards == 1 else f"{header.shards} shards"
    more = header.files - len(header.sources)
    names = ", ".join(header.sources) + (f" and {more} more" if more else "")
    say(
        f"{file}: whole, every byte as it was written",
        f"{header.tokens:,} tokens in {shards}, {header.file_bytes / 1e6:.1f} MB",
        f"tokenizer of {header.model}: {header.vocab_size} ids, {header.tokenizer[:16]}",
        f"made of {names}",
    )
