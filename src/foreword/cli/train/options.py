"""Options of all methods of `foreword train`."""

from dataclasses import dataclass
from pathlib import Path

from foreword.cli.console import DEFAULT_MODEL, DeviceOption, ModelOption, parse_sizes, plot_option
from foreword.cli.options.grouped import REQUIRED, Command, flag, late, option
from foreword.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class WorkOptions(Command):
    """Model, device and prompts."""

    model: ModelOption = late(DEFAULT_MODEL, -1)
    prompts: list[Path] | None = option(
        None, "JSON lines with prompts to answer in addition to self-written ones; repeatable."
    )
    compiled: bool = option(True, "Compile the training pass (on a GPU).", last=2)
    device: DeviceOption = late("auto", 2)


@dataclass(frozen=True, kw_only=True)
class CommonOptions(WorkOptions):
    """Data, duration and learning rates."""

    out: Path = option(REQUIRED, "Output directory.", last=-2)
    data: Path | None = option(
        None, "Directory of training texts. Default: OUT/texts, written first if there are none."
    )
    minutes: float | None = option(
        None, "Time limit of the whole command: loading, writing texts, training and evaluation.", min=0.01
    )
    steps: int | None = option(None, "Train this many steps; with --resume, this many more.", min=1)
    resume: bool = flag("Continue from the last state in --out.")
    begin: Path | None = option(None, "Start from the weights in this directory, with a new optimiser.")
    final: bool = option(True, "Decay the learning rate at the end.")
    evaluate: list[Path] | None = option(
        None, "JSON lines with prompts for evaluation, never trained on; repeatable.", "--eval"
    )
    evaluate_every: float = option(90.0, "Seconds between two evaluations.", min=0)
    export: Path | None = option(None, "Also write the weights to this directory, in files of at most 15 MB.")
    export_bits: int = option(16, "Bits per weight of the exported matrices: 16, 8 or 4.")
    depth: int = option(4, "Length of a draft chain.", min=1, max=16)
    batch_tokens: int | None = option(None, "Tokens per training step.", min=64)
    muon: float | None = option(None, "Learning rate of Muon (matrices).", min=0)
    adam: float | None = option(None, "Learning rate of AdamW (other weights).", min=0)
    sharpness: float = option(1.0, "Exponent on the target's probabilities.", min=0.01)
    decay_share: float = option(
        0.4, "Fraction of training spent decaying the learning rate.", min=0.01, max=1
    )
    keep_states: float = option(
        0.0, "GiB of device memory for the target's hidden states, computed once for all epochs.", min=0
    )
    seed: int = option(0, "Seed of weights and data order.", min=0)
    plot: Path | None = plot_option()

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise RequestError("say how long to train: --minutes or --steps")
        if self.prompts and self.data is not None:
            raise RequestError(
                "--prompts are answered where texts are written: give them to `foreword train data`"
            )
        if self.export_bits not in (4, 8, 16):
            raise RequestError(f"--export-bits must be 4, 8 or 16, not {self.export_bits}")
        if self.resume and self.begin is not None:
            raise RequestError("--resume goes on with weights that are there; leave out --begin")


def parse_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Parse comma-separated layers."""
    return None if text is None else tuple(parse_sizes(option, text))
