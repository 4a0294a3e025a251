"""`foreword train`: heads and draft models from texts that the target writes itself."""

from typing import Annotated

import typer

from foreword.cli.options.grouped import options_command
from foreword.cli.train import data
from foreword.cli.train.options import CommonOptions, parse_numbers

DraftVocab = Annotated[
    int, typer.Option(min=1, help="Size of the head's vocabulary: the most frequent tokens.")
]
Taps = Annotated[str | None, typer.Option(help="Layers whose hidden states the head reads, such as 2,15,27.")]
Intermediate = Annotated[int | None, typer.Option(min=1, help="Width of the MLP. Default: the model's.")]


@options_command
def eagle3(
    options: CommonOptions,
    draft_vocab: DraftVocab = 16384,
    taps: Taps = None,
    intermediate: Intermediate = None,
) -> None:
    """Train an EAGLE-3 head.

    Example: foreword train eagle3 --out head --minutes 5
    """
    from foreword.cli.train.session import run_training
    from foreword.train.heads.eagle3 import Eagle3Recipe
    from foreword.train.loop.optimizer import Rates

    recipe = Eagle3Recipe(draft_vocab, parse_numbers("--taps", taps), intermediate)
    run_training(options, recipe, Rates(muon=0.02, adam=1e-3))


@options_command
def medusa(
    options: CommonOptions,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Number of heads: one per draft position.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, max=8, help="Residual blocks per head.")] = 1,
    draft_vocab: DraftVocab = 16384,
) -> None:
    """Train Medusa heads.

    Example: foreword train medusa --out heads --minutes 5
    """
    from foreword.cli.train.session import run_training
    from foreword.train.heads.medusa import MedusaRecipe
    from foreword.train.loop.optimizer import Rates

    run_training(options, MedusaRecipe(heads, blocks, draft_vocab), Rates(muon=0.02, adam=1e-3))


@options_command
def draft(
    options: CommonOptions,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 4,
    copy: Annotated[
        str | None, typer.Option(help="Layers of the model to start from, such as 0,10,20,29.")
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Start from random layers instead of copied ones.")
    ] = False,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size. Default: the model's.")] = None,
    intermediate: Intermediate = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads. Default: the model's.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads. Default: the model's.")
    ] = None,
) -> None:
    """Train a draft model on the target's distribution.

    Example: foreword train draft --out small --layers 4 --minutes 5
    """
    from foreword.cli.train.session import run_training
    from foreword.train.heads.draft import DraftRecipe
    from foreword.train.loop.optimizer import Rates

    copied = parse_numbers("--copy", copy)
    recipe = DraftRecipe(layers, copied, random, hidden, intermediate, heads, kv_heads)
    run_training(options, recipe, Rates(muon=0.01, adam=1e-3))


@options_command
def exit_(
    options: CommonOptions,
    layer: Annotated[
        int | None,
        typer.Option(help="Number of the target's layers before the exit. Default: a quarter of them."),
    ] = None,
) -> None:
    """Train an early exit: a layer and a norm after the model's first layers.

    Example: foreword train exit --out exit --layer 8 --minutes 5
    """
    from foreword.cli.train.session import run_training
    from foreword.train.heads.exit import ExitRecipe
    from foreword.train.loop.optimizer import Rates

    run_training(options, ExitRecipe(layer), Rates(muon=0.01, adam=1e-3))


@options_command
def dflash(
    options: CommonOptions,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 2,
    guesses: Annotated[int, typer.Option(min=1, max=31, help="Draft tokens per pass.")] = 4,
    draft_vocab: DraftVocab = 16384,
    taps: Taps = None,
    intermediate: Intermediate = None,
) -> None:
    """Train a DFlash head, which fills in a block of tokens at once.

    Example: foreword train dflash --out head --minutes 5
    """
    from foreword.cli.train.session import run_training
    from foreword.train.heads.dflash import DFlashRecipe
    from foreword.train.loop.optimizer import Rates

    recipe = DFlashRecipe(layers, guesses, parse_numbers("--taps", taps), intermediate, draft_vocab)
    run_training(options, recipe, Rates(muon=0.02, adam=1e-3))


app = typer.Typer(
    no_args_is_help=True, help="Train a head or a draft model on texts that the target writes itself."
)
app.command()(data.data)
app.command()(eagle3)
app.command()(medusa)
app.command()(draft)
app.command("exit")(exit_)
app.command()(dflash)
app.command()(data.join)
