"""The `foreword` command."""

import re
import sys
from difflib import get_close_matches
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

KNOWN_ELSEWHERE = {
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
"""Commands of vLLM, llama.cpp and ollama, and their equivalents here."""

CUTOFF = 0.7
"""Minimum difflib similarity: one wrong letter in four, or two swapped ones."""


def suggested(name: str, commands: list[str]) -> list[str]:
    """Return the commands that a user who typed `name` probably means; empty if none is close."""
    known = KNOWN_ELSEWHERE.get(name.lower())
    return list(known) if known else get_close_matches(name, commands, cutoff=CUTOFF)


class SuggestingGroup(TyperGroup):
    """The root command, which suggests a command for an unknown name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer's own click types
        """Return the command, or fail with a suggestion."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            found = " or ".join(repr(one) for one in suggested(name, self.list_commands(ctx)))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {found}?" if found else ""))
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
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(chat.run)
app.command()(demo.demo)
app.command(cls=ServeCommand)(serve.serve)
app.command()(batch.batch)
app.command()(cluster.router)
app.command("draft-node")(cluster.draft_node)
app.command()(models.pull)
app.command("models")(models.list_models)
app.command()(models.warm)
app.command()(models.prune)
app.command()(prove.prove)
app.command()(watch.top)
app.command()(watch.advise)
app.command()(policy.tune)
app.command()(theory.theory)
app.command()(simulate.simulate)
app.command()(doctor.doctor)
app.command("man")(man.man)
app.add_typer(heads.app, name="head")
app.add_typer(bench.app, name="bench")
app.add_typer(cluster.app, name="cluster")
app.add_typer(datastore.app, name="datastore")
app.add_typer(train.app, name="train")
app.add_typer(policy.app, name="policy")


def _show_version(wanted: bool) -> None:
    if wanted:
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
    # Without it, a collection of loaded objects would take 0.1 s between tokens.
    console.after_loading = spare_steps
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except _UsageError as error:
        if error.ctx is not None and type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help(), file=sys.stderr)
            sys.exit(2)
        where = "" if error.ctx is None else f" (see {error.ctx.command_path} --help)"
        _end(f"{_plainly(error.format_message())}{where}", 2)
    except ForewordError as error:
        _end(str(error), error.exit_code)
    except typer.Abort:
        _end("stopped", 1)


def _plainly(message: str) -> str:
    """Return a usage error in the format of all errors: the option's name, then the requirement."""
    found = re.fullmatch(r"Invalid value for '?(.*?)'?: (.*)", message, re.DOTALL)
    return (f"{found[1]} {in_plain_words(found[2])}" if found else message).rstrip(".")


def _end(message: str, code: int) -> NoReturn:
    console.note(f"foreword: {' '.join(message.split())}")
    sys.exit(code)
