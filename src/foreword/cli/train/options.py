"""The options that all methods of `foreword train` have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.console import DEFAULT_MODEL, DeviceOption, ModelOption, PlotOption
from foreword.errors import RequestError

PromptsOption = Annotated[
    list[Path] | None,
    typer.Option(help="JSON lines with prompts to answer in addition to self-written ones; repeatable."),
]
CompileOption = Annotated[bool, typer.Option(help="Compile the training pass (on a GPU).")]


@dataclass(frozen=True)
class CommonOptions:
    """What is trained where, how long and how fast."""

    out: Annotated[Path, typer.Option(help="Output directory.")]
    model: ModelOption = DEFAULT_MODEL
    data: Annotated[
        Path | None,
        typer.Option(
            help="Directory of training texts. Default: OUT/texts, written first if there are none."
        ),
    ] = None
    prompts: PromptsOption = None
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="Time limit of the whole command: loading, writing texts, training and evaluation."
        ),
    ] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train this many steps; with --resume, this many more.")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last state in --out.")] = False
    begin: Annotated[
        Path | None,
        typer.Option(help="Start from the weights in this directory, with a new optimiser."),
    ] = None
    final: Annotated[bool, typer.Option(help="Decay the learning rate at the end.")] = True
    evaluate: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="JSON lines with prompts for evaluation, never trained on; repeatable."),
    ] = None
    evaluate_every: Annotated[float, typer.Option(min=0, help="Seconds between two evaluations.")] = 90.0
    export: Annotated[
        Path | None, typer.Option(help="Also write the weights to this directory, in files of at most 15 MB.")
    ] = None
    export_bits: Annotated[int, typer.Option(help="Bits per weight of the exported matrices: 16 or 8.")] = 16
    depth: Annotated[int, typer.Option(min=1, max=16, help="Length of a draft chain.")] = 4
    batch_tokens: Annotated[int | None, typer.Option(min=64, help="Tokens per training step.")] = None
    muon: Annotated[float | None, typer.Option(min=0, help="Learning rate of Muon (matrices).")] = None
    adam: Annotated[float | None, typer.Option(min=0, help="Learning rate of AdamW (other weights).")] = None
    sharpness: Annotated[float, typer.Option(min=0.01, help="Exponent on the target's probabilities.")] = 1.0
    decay_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Fraction of training spent decaying the learning rate.")
    ] = 0.4
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data order.")] = 0
    plot: PlotOption = None
    compiled: CompileOption = True
    device: DeviceOption = "auto"

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise RequestError("say how long to train: --minutes or --steps")
        if self.prompts and self.data is not None:
            raise RequestError(
                "--prompts are answered where texts are written: give them to `foreword train data`"
            )
        if self.export_bits not in (8, 16):
            raise RequestError(f"--export-bits must be 8 or 16, not {self.export_bits}")
        if self.resume and self.begin is not None:
            raise RequestError("--resume goes on with weights that are there; leave out --begin")


def parse_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Layers, separated by commas."""
    from foreword.cli.console import parse_sizes

    return None if text is None else tuple(parse_sizes(option, text))
