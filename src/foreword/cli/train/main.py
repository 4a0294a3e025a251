"""`foreword train`: a head or a draft for a model, from texts that the model writes itself."""

import typer

from foreword.cli.train import data, methods

app = typer.Typer(
    no_args_is_help=True, help="Train a head or a draft model on texts that the target writes itself."
)
app.command()(data.data)
app.command()(methods.eagle3)
app.command()(methods.medusa)
app.command()(methods.draft)
app.command("exit")(methods.exit_)
app.command()(methods.dflash)
app.command()(data.join)
