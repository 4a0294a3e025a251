"""`foreword pull`, `models`, `prune` and `warm`: fetch, list and prepare models."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from foreword.cli.console import (
    fetched,
    fields_of,
    load_llm,
    loading_bar,
    print_json,
    progress_bar,
    say,
    stage_bar,
    stdout,
)
from foreword.cli.options.common import JsonOption
from foreword.cli.options.model import DEFAULT_MODEL, ModelArgument, check_model
from foreword.errors import RequestError


def pull(
    name: Annotated[
        str, typer.Argument(callback=check_model, help="Built-in name or hub id: org/name:file.gguf.")
    ] = DEFAULT_MODEL,
) -> None:
    """Fetch a model into the cache and verify its checksums; a fetch that was cut off is resumed."""
    from foreword.models.sources.resolve import pull_model

    with loading_bar() as on_stage:
        path = pull_model(name, on_stage)
    say(f"{name} is ready: {path}")


def models(
    supported: Annotated[bool, typer.Option("--supported", help="List families and backends.")] = False,
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
    lines = [
        (e.name, f"{e.bytes / 1e6:.0f} MB", "yes" if e.present else "no", e.description, str(e.path))
        for e in entries
    ]
    _print_table(("name", "size", "fetched", "what it is", "path"), lines)
    if stdout.is_terminal:
        stdout.print("Also: a .gguf file, a Hugging Face directory, or a hub id such as org/name.")


def _list_supported(as_json: bool) -> None:
    from foreword.backends.support import BACKENDS, supported_families

    families = supported_families()
    if as_json:
        print_json({"families": fields_of(families)})
        return
    lines = [(row.models, row.hf_class, row.formats, *row.backends.values()) for row in families]
    _print_table(("models", "class", "files", *BACKENDS), lines)


def _print_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, otherwise lines of cells separated by tabs."""
    if not stdout.is_terminal:  # for cut and awk: no wrapping
        for line in (headings, *lines):
            print("\t".join(line))
        return
    table = Table(*headings[:-1])
    table.add_column(headings[-1], overflow="fold")
    for line in lines:
        table.add_row(*line)
    stdout.print(table)


def prune(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(help="New .gguf file for a GGUF model, else a new directory.")],
    layers: Annotated[str | None, typer.Option(help="Layers to keep, such as 0-9,20-29.")] = None,
    keep: Annotated[int | None, typer.Option(help="Number of layers to keep, evenly spaced.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a copy of a model with some of its layers: a draft model that has the target's tokenizer.

    Example: foreword prune smollm2-135m draft.gguf --keep 10
    """
    from foreword.models.pruning import parse_layers
    from foreword.models.pruning import prune as write_pruned

    if (layers is None) == (keep is None):
        raise RequestError("give either --layers, such as 0-9,20-29, or --keep with a number of layers")
    wanted = parse_layers(layers) if layers is not None else keep or 0
    path = fetched(model)
    missing = [str(parent) for parent in reversed(out.parents) if not parent.exists()]
    with progress_bar(f"writing {out}") as on_progress:
        kept = write_pruned(path, out, wanted, on_progress)
    size = sum(file.stat().st_size for file in (out.iterdir() if out.is_dir() else [out]))
    if as_json:
        print_json({"model": model, "out": str(out), "layers": kept, "bytes": size, "directories": missing})
        return
    if missing:
        say(f"made {', '.join(missing)}")
    numbers = ", ".join(map(str, kept))
    say(f"{out}: {len(kept)} layers ({numbers}), {size / 1e6:.0f} MB")


def warm(
    model: ModelArgument,
    speculation: Annotated[str, typer.Option(help="Drafter, as for generate.")] = "auto",
    quantization: Annotated[str, typer.Option(help="Weights: auto, none, fp8 or int4.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Most requests at once.", min=1)] = 64,
    as_json: JsonOption = False,
) -> None:
    """Compile all kernels that a model needs on this GPU; later starts find them on disk.

    Example: foreword warm smollm2-135m
    """
    import torch

    if not torch.cuda.is_available():
        raise RequestError("foreword warm needs a CUDA GPU; other backends compile nothing")
    from foreword.engine.config import EngineConfig
    from foreword.engine.preparing import compile_passes

    config = EngineConfig(max_num_seqs=max_num_seqs)
    llm = load_llm(
        model,
        dtype="auto",
        device="cuda",
        backend="cuda",
        quantization=quantization,
        speculation=speculation,
        config=config,
    )
    with stage_bar() as on_stage:
        count = compile_passes(llm.engine, max_num_seqs, partial(on_stage, "compiling kernels"))
    if as_json:
        print_json({"model": model, "kernels": count})
    else:
        say(f"{model}: {count} kernels are compiled for {torch.cuda.get_device_name()}")
