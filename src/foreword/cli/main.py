"""The `foreword` command."""

import os
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from foreword import __version__
from foreword.cli import (
    batch,
    console,
    datastore,
    demo,
    doctor,
    generate,
    heads,
    learn,
    man,
    models,
    policy,
    serve,
    theory,
    watch,
)
from foreword.cli.bench import main as bench
from foreword.cli.chat import main as chat
from foreword.cli.cluster import main as cluster
from foreword.cli.cluster import simulate
from foreword.cli.options.serve import ServeCommand
from foreword.cli.prove import main as prove
from foreword.cli.train import main as train
from foreword.engine.collection import spare_steps
from foreword.errors import ForewordError, in_plain_words

KNOWN_ELSEWHERE = {  # name: equivalents here
    "list": ("models",),  # ollama
    "ls": ("models",),
    "ps": ("top",),
    "show": ("models", "doctor"),
    "complete": ("generate",),  # vLLM
    "collect-env": ("doctor",),
    "cli": ("chat", "generate"),  # llama.cpp
    "llama-cli": ("chat", "generate"),
    "server": ("serve",),
    "llama-server": ("serve",),
    "completion": ("generate",),
    "download": ("pull",),
    "fetch": ("pull",),
    "info": ("doctor",),
    "status": ("top", "doctor"),
    "version": ("--version",),
}
"""Commands of ollama, vLLM and llama.cpp, and their equivalents here."""

CUTOFF = 0.7  # minimum difflib similarity: one wrong letter in four, or two swapped ones


def suggested(name: str, commands: list[str]) -> list[str]:
    """Return the commands that a user who typed `name` probably means; empty if none is close."""
    equivalents = KNOWN_ELSEWHERE.get(name.lower())
    return list(equivalents or get_close_matches(name, commands, cutoff=CUTOFF))


class SuggestingGroup(TyperGroup):
    """The root command, which suggests a command for an unknown name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer's own click types
        """Return the command, or fail with a suggestion."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            likely = " or ".join(map(repr, suggested(name, self.list_commands(ctx))))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {likely}?" if likely else ""))
        return super().resolve_command(ctx, args)


# Typer vendors click, and does not export its errors.
_UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    cls=SuggestingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's boxes take a third of the width
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Exact speculative decoding for language models: the same text in fewer passes.",
)
for _command in (
    *(generate.generate, chat.chat, chat.run, demo.demo, serve.serve, batch.batch, cluster.router),
    *(cluster.draft_node, models.pull, models.models, models.warm, models.prune, prove.prove, watch.top),
    *(watch.advise, policy.tune, theory.theory, simulate.simulate, doctor.doctor, man.man),
):
    app.command(cls=ServeCommand if _command is serve.serve else None)(_command)
_GROUPS = (heads, "head"), (bench, "bench"), (cluster, "cluster"), (datastore, "datastore")
for _group, _name in (*_GROUPS, (train, "train"), (policy, "policy"), (learn, "learn")):
    app.add_typer(_group.app, name=_name)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        console.stdout.print(f"foreword {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Exact speculative decoding for language models: the same text in fewer passes."""


def main() -> None:
    """Run the command line; an error that the user can fix is one line and exit code 2."""
    if sys.stdin is None:  # closed, as by `<&-`: the same as empty
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - until the process ends
    # Without it, a collection of loaded objects would take 0.1 s between tokens.
    console.after_loading = spare_steps
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except _UsageError as error:
        if error.ctx is not None and type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help(), file=sys.stderr)
            sys.exit(2)
        where = "" if error.ctx is None else f" (see {error.ctx.command_path} --help)"
        _exit_with(f"{_reworded(error.format_message())}{_model_hint(error)}{where}", 2)
    except ForewordError as error:
        _exit_with(str(error), error.exit_code)
    except typer.Abort:
        _exit_with("stopped", 1)


def _reworded(message: str) -> str:
    """Return click's usage error in the format of all errors: the option's name, then the requirement."""
    if parts := re.fullmatch(r"Invalid value for '?(.*?)'?: (.*)", message, re.DOTALL):
        message = f"{parts[1]} {in_plain_words(parts[2])}"
    return message.rstrip(".")


def _model_hint(error: Any) -> str:  # noqa: ANN401 - see `_UsageError`
    """Return how this command takes its model, if the user has given it in the other way; empty: nothing to say."""
    if error.ctx is None:
        return ""
    message, names = error.format_message(), {name for one in error.ctx.command.params for name in one.opts}
    if message.startswith("Got unexpected extra argument") and "--model" in names:
        return "; give a model with --model"
    if message.startswith(("No such option: --model", "No such option: -m")) and names & {"model", "name"}:
        return f"; give the model as an argument: {error.ctx.command_path} MODEL"
    return ""


def _exit_with(message: str, code: int) -> NoReturn:
    console.note(f"foreword: {' '.join(message.split())}")
    sys.exit(code)
