"""`foreword prune`: a copy of a model with fewer layers."""

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.console import JsonOption, ModelArgument, print_json, progress_bar, stage_bar, stdout
from foreword.errors import RequestError


def prune(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(help="New .gguf file for a GGUF model, else a new directory.")],
    layers: Annotated[
        str | None, typer.Option(help="Layers to keep, such as 0-9,20-29 (ends included).")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(help="Number of layers to keep, evenly spaced, with the first and the last.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a copy of a model with some of its layers: a draft model that has the target's tokenizer.

    Example: foreword prune smollm2-135m draft.gguf --keep 10
    """
    from foreword.models.pruning import parse_layers
    from foreword.models.pruning import prune as write_pruned
    from foreword.models.sources.resolve import resolve_model

    if (layers is None) == (keep is None):
        raise RequestError("give either --layers, such as 0-9,20-29, or --keep with a number of layers")
    wanted = parse_layers(layers) if layers is not None else keep or 0
    with stage_bar() as on_stage:
        path = resolve_model(model, on_progress=on_stage)
    missing = [str(parent) for parent in reversed(out.parents) if not parent.exists()]
    with progress_bar(f"writing {out}") as on_progress:
        kept = write_pruned(path, out, wanted, on_progress)
    size = sum(file.stat().st_size for file in (out.iterdir() if out.is_dir() else [out]))
    if as_json:
        print_json({"model": model, "out": str(out), "layers": kept, "bytes": size, "directories": missing})
        return
    if missing:
        stdout.print(f"made {', '.join(missing)}", markup=False, soft_wrap=True)
    numbers = ", ".join(map(str, kept))
    stdout.print(f"{out}: {len(kept)} layers ({numbers}), {size / 1e6:.0f} MB", soft_wrap=True)
