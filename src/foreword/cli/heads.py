"""`foreword head`: inspect, convert and quantise draft heads."""

import json
from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.console import print_json, say
from foreword.cli.options.common import JsonOption
from foreword.errors import RequestError

app = typer.Typer(no_args_is_help=True, help="Inspect, convert and quantise draft heads.")

HeadArgument = Annotated[str, typer.Argument(metavar="HEAD", help="Draft head: path or hub id.")]
OutArgument = Annotated[Path, typer.Argument(help="New directory.")]


@app.command()
def show(head: HeadArgument, as_json: JsonOption = False) -> None:
    """Show method, sizes, tapped layers and shared weights of a draft head, a trained exit or a draft model."""
    from foreword.models.heads.describe import describe_trained
    from foreword.models.sources.resolve import resolve_model

    description = describe_trained(resolve_model(head))
    if as_json:
        print_json(description)
        return
    for key, value in description.items():
        text = json.dumps(value) if isinstance(value, dict) else value
        if isinstance(value, list):
            text = ", ".join(map(str, value)) or "none"
        say(f"{key.replace('_', ' ')}: {text}")


@app.command()
def convert(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="Draft head in any published layout.")],
    out: OutArgument,
    as_json: JsonOption = False,
) -> None:
    """Write a head in speculators' layout, as safetensors.

    Pickles are read here alone, and only their tensors (torch.load with weights_only).
    """
    from foreword.models.heads.writing import convert_head
    from foreword.models.sources.resolve import resolve_model

    _report(out, convert_head(resolve_model(head), out), as_json)


@app.command()
def quantize(
    head: HeadArgument,
    out: OutArgument,
    target: Annotated[str | None, typer.Option(help="Target, whose matrices are not copied.")] = None,
    bits: Annotated[int, typer.Option(help="Bits per weight: 8 or 4.")] = 8,
    as_json: JsonOption = False,
) -> None:
    """Write a head with its matrices in 8 or 4 bits.

    Example: foreword head quantize my-head my-head-int8 --target smollm2-135m
    """
    from foreword.models.heads.opening import open_head, without_copies
    from foreword.models.heads.writing import ROUNDED_BITS, quantize_head
    from foreword.models.sources.resolve import resolve_model

    if bits not in ROUNDED_BITS:
        raise RequestError(f"--bits must be 8 or 4, not {bits}")
    opened = open_head(resolve_model(head))
    if target is not None:
        from foreword.models.formats.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(resolve_model(target))
        opened = without_copies(opened.fitted(checkpoint.config), checkpoint)
    _report(out, quantize_head(opened, out, bits), as_json)


def _report(out: Path, size: int, as_json: bool) -> None:
    if as_json:
        print_json({"out": str(out), "bytes": size})
    else:
        say(f"{out}: {size / 1e6:.1f} MB")
