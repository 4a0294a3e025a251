"""`foreword train`: heads and draft models from texts that the target writes itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from foreword.cli.options.common import parse_sizes, plot_option
from foreword.cli.options.grouped import REQUIRED, command, flag, option, pick
from foreword.cli.train import data
from foreword.cli.train.data import WorkOptions
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.train.heads.learner import Recipe


@dataclass(frozen=True, kw_only=True)
class CommonOptions(WorkOptions):
    """Data, duration and learning rates."""

    out: Path = option(REQUIRED, "Output directory.", last=-2)
    data: Path | None = option(None, "Directory of training texts. Default: OUT/texts, written if empty.")
    minutes: float | None = option(None, "Time limit in minutes, loading and evaluation included.", min=0.01)
    steps: int | None = option(None, "Train this many steps; with --resume, this many more.", min=1)
    resume: bool = flag("Continue from the last state in --out.")
    begin: Path | None = option(None, "Start from the weights in this directory, with a new optimiser.")
    final: bool = option(True, "Decay the learning rate at the end.")
    evaluate: list[Path] | None = option(None, "Evaluation prompts as JSON lines; repeatable.", "--eval")
    evaluate_every: float = option(90.0, "Seconds between two evaluations.", min=0)
    export: Path | None = option(None, "Also write the weights to this directory, in files of at most 15 MB.")
    export_bits: int = option(16, "Bits per weight of the exported matrices: 16, 8 or 4.")
    depth: int = option(4, "Length of a draft chain.", min=1, max=16)
    batch_tokens: int | None = option(None, "Tokens per training step.", min=64)
    muon: float | None = option(None, "Learning rate of Muon (matrices).", min=0)
    adam: float | None = option(None, "Learning rate of AdamW (other weights).", min=0)
    sharpness: float = option(1.0, "Exponent on the target's probabilities.", min=0.01)
    decay_share: float = option(0.4, "Fraction of training that decays the learning rate.", min=0.01, max=1)
    keep_states: float = option(0.0, "GiB of device memory that caches the target's hidden states.", min=0)
    seed: int = option(0, "Seed of weights and data order.", min=0)
    speed: bool = option(True, "Measure the expected speed-up at the end, after the time limit.")
    plot: Path | None = plot_option()

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise RequestError("say how long to train: --minutes or --steps")
        if self.prompts and self.data is not None:
            raise RequestError("--prompts need texts to be written: give them to `foreword train data`")
        if self.export_bits not in (4, 8, 16):
            raise RequestError(f"--export-bits must be 4, 8 or 16, not {self.export_bits}")
        if self.resume and self.begin is not None:
            raise RequestError("--resume goes on with weights that are there; leave out --begin")


def parse_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(parse_sizes(option, text))


MODELS_WIDTH = "Width of the MLP. Default: the model's."
LAYERS_READ = "Layers whose hidden states the head reads, such as 2,15,27."
WINDOW = "Newest positions that the head attends to, such as 2048. Default: all."
VOCABULARY = "Size of the head's vocabulary: the most frequent tokens."


@dataclass(frozen=True, kw_only=True)
class _Training(CommonOptions):
    """A training method; `muon_rate` is the default learning rate of its matrices."""

    muon_rate: ClassVar[float] = 0.02

    def recipe(self) -> "Recipe":
        raise NotImplementedError

    def run(self) -> None:
        from foreword.cli.train.session import run_training
        from foreword.train.loop.trainer import LearningRates

        run_training(self, self.recipe(), LearningRates(muon=self.muon_rate, adam=1e-3))


@dataclass(frozen=True, kw_only=True)
class Eagle3(_Training):
    """Train an EAGLE-3 head.

    Example: foreword train eagle3 --out head --minutes 5
    """

    draft_vocab: int = option(16384, VOCABULARY, min=1, last=3)
    taps: str | None = option(None, LAYERS_READ, last=3)
    intermediate: int | None = option(None, MODELS_WIDTH, min=1, last=3)
    own_output: bool = option(True, "Train an output matrix instead of using the model's.", last=3)
    drift_norms: bool = flag("EAGLE-3.1: norms of all inputs, which keep long drafts stable.", last=3)
    head_window: int | None = option(None, WINDOW, min=1, last=3)
    round_bits: int | None = option(None, "Round weights to 8 or 4 bits while the rate decays.", last=3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.round_bits not in (None, 4, 8):
            raise RequestError(f"--round-bits must be 4 or 8, not {self.round_bits}")
        if self.round_bits is not None and not self.final:
            raise RequestError("--round-bits needs the decay of the learning rate; leave out --no-final")

    def recipe(self) -> "Recipe":
        from foreword.train.heads.eagle3 import Eagle3Recipe

        return pick(Eagle3Recipe, self, taps=parse_numbers("--taps", self.taps), window=self.head_window)


@dataclass(frozen=True, kw_only=True)
class Medusa(_Training):
    """Train Medusa heads.

    Example: foreword train medusa --out heads --minutes 5
    """

    heads: int = option(4, "Number of heads: one per draft position.", min=1, max=16, last=3)
    blocks: int = option(1, "Residual blocks per head.", min=1, max=8, last=3)
    draft_vocab: int = option(16384, VOCABULARY, min=1, last=3)

    def recipe(self) -> "Recipe":
        from foreword.train.heads.medusa import MedusaRecipe

        return pick(MedusaRecipe, self)


@dataclass(frozen=True, kw_only=True)
class Draft(_Training):
    """Train a draft model on the target's distribution.

    Example: foreword train draft --out small --layers 4 --minutes 5
    """

    muon_rate: ClassVar[float] = 0.01
    layers: int = option(4, "Number of layers.", min=1, last=3)
    copy: str | None = option(None, "Layers of the model to start from, such as 0,10,20,29.", last=3)
    random: bool = flag("Start from random layers instead of copied ones.", last=3)
    hidden: int | None = option(None, "Hidden size. Default: the model's.", min=1, last=3)
    intermediate: int | None = option(None, MODELS_WIDTH, min=1, last=3)
    heads: int | None = option(None, "Query heads. Default: the model's.", min=1, last=3)
    kv_heads: int | None = option(None, "Key/value heads. Default: the model's.", min=1, last=3)

    def recipe(self) -> "Recipe":
        from foreword.train.heads.decoders import DraftRecipe

        return pick(DraftRecipe, self, copied=parse_numbers("--copy", self.copy))


@dataclass(frozen=True, kw_only=True)
class Exit(_Training):
    """Train an early exit: a layer and a norm after the model's first layers.

    Example: foreword train exit --out exit --layer 8 --minutes 5
    """

    muon_rate: ClassVar[float] = 0.01
    layer: int | None = option(None, "Target layers before the exit. Default: a quarter.", last=3)

    def recipe(self) -> "Recipe":
        from foreword.train.heads.decoders import ExitRecipe

        return ExitRecipe(self.layer)


@dataclass(frozen=True, kw_only=True)
class DFlash(_Training):
    """Train a DFlash head, which fills in a block of tokens at once.

    Example: foreword train dflash --out head --minutes 5
    """

    layers: int = option(2, "Number of layers.", min=1, last=3)
    guesses: int = option(4, "Draft tokens per pass.", min=1, max=31, last=3)
    causal: bool = flag("JetSpec: a draft token does not see those after it.", last=3)
    draft_vocab: int = option(16384, VOCABULARY, min=1, last=3)
    taps: str | None = option(None, LAYERS_READ, last=3)
    intermediate: int | None = option(None, MODELS_WIDTH, min=1, last=3)
    head_window: int | None = option(None, WINDOW, min=2, last=3)

    def recipe(self) -> "Recipe":
        from foreword.train.heads.dflash import DFlashRecipe

        taps = parse_numbers("--taps", self.taps)
        return pick(DFlashRecipe, self, draft_tokens=self.guesses, taps=taps, window=self.head_window)


@dataclass(frozen=True, kw_only=True)
class DFlash2(DFlash):
    """Train a DFlash2 head: DFlash with convolutions, and a selector among the best tokens.

    Example: foreword train dflash2 --out head --minutes 5
    """

    selector_rank: int = option(64, "Length of the selector's vectors.", min=1, last=3)
    candidates: int = option(16, "Best tokens of a position that the selector scores.", min=2, last=3)

    def recipe(self) -> "Recipe":
        from foreword.train.heads.dflash2 import DFlash2Recipe

        taps = parse_numbers("--taps", self.taps)
        return pick(DFlash2Recipe, self, draft_tokens=self.guesses, taps=taps, window=self.head_window)


app = typer.Typer(no_args_is_help=True, help="Train a head or a draft model on the target's own texts.")
for _kind in (data.Data, Eagle3, Medusa, Draft, Exit, DFlash, DFlash2, data.Join):
    app.command()(command(_kind))
