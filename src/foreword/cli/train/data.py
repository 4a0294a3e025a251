"""`foreword train data` and `foreword train join`."""

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.console import DEFAULT_MODEL, DeviceOption, ModelOption, stage_bar, stdout
from foreword.cli.train.options import CompileOption, PromptsOption
from foreword.errors import RequestError


def data(
    out: Annotated[Path, typer.Argument(help="Directory of the shards; new ones are added.")],
    model: ModelOption = DEFAULT_MODEL,
    prompts: PromptsOption = None,
    only_prompts: Annotated[
        bool, typer.Option("--only-prompts", help="Answer only the prompts of --prompts.")
    ] = False,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="Minutes to write.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Answer tokens to write.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Texts written at once (batch size).")] = None,
    context: Annotated[int, typer.Option(min=32, help="Most tokens of prompt and answer.")] = 1280,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Random seed. Default: the number of shards in the directory.",
        ),
    ] = None,
    show: Annotated[
        int | None, typer.Option(min=1, help="Print this many of the texts and write nothing.")
    ] = None,
    compiled: CompileOption = True,
    device: DeviceOption = "auto",
) -> None:
    """Write training texts with the model itself.

    Example: foreword train data texts --minutes 2
    """
    if show is not None:
        _show(out, model, show)
        return
    if minutes is None and tokens is None:
        raise RequestError("say how much to write: --minutes or --tokens")
    if only_prompts and not prompts:
        raise RequestError("--only-prompts needs --prompts")
    from foreword.cli.train.session import (
        STOPPED,
        ConsoleWatcher,
        Workplace,
        memory_in_one_line,
        read_prompts,
        stop_signals,
        write_texts,
    )
    from foreword.train.files import require_directory
    from foreword.train.texts.data import WritingSettings
    from foreword.train.texts.documents import count_shards, require_written_by

    require_directory(out)
    asked = read_prompts(prompts)
    place = Workplace(model, device, compiled=compiled)
    require_written_by(out, place.identity)
    with stop_signals() as stopped, memory_in_one_line("give fewer --rows"), stage_bar() as bar:
        settings = WritingSettings(
            context=context,
            seconds=None if minutes is None else 60 * minutes,
            answer_tokens=tokens,
            only_prompts=only_prompts,
            seed=count_shards(out) if seed is None else seed,
            stop=stopped,
        )
        write_texts(place, out, settings, asked, rows, ConsoleWatcher(bar))
    if stopped():
        raise typer.Exit(STOPPED)


def join(
    pieces: Annotated[Path, typer.Argument(help="Directory written by --export.")],
    out: Annotated[Path, typer.Argument(help="New directory.")],
    model: ModelOption = DEFAULT_MODEL,
) -> None:
    """Join the files of an --export.

    Example: foreword train join pieces head
    """
    from foreword.cli.train.session import say
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.sources.resolve import resolve_model
    from foreword.train.loop.output import join_pieces

    join_pieces(pieces, out, open_checkpoint(resolve_model(model)))
    say(f"{out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e6:.1f} MB")


def _show(directory: Path, model: str, count: int) -> None:
    from itertools import islice

    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.sources.resolve import resolve_model
    from foreword.train.files import identity_of
    from foreword.train.texts.documents import count_shards, read_shards, require_written_by

    if not count_shards(directory):
        raise RequestError(
            f"there are no training texts in {directory}; write some with --minutes or --tokens"
        )
    checkpoint = open_checkpoint(resolve_model(model))
    require_written_by(directory, identity_of(checkpoint))
    tokenizer = checkpoint.tokenizer()
    for document in islice(read_shards(directory), count):
        begin = document.answer_begin
        prompt = tokenizer.decode(document.tokens[:begin].tolist(), skip_special_tokens=False)
        answer = tokenizer.decode(document.tokens[begin:].tolist(), skip_special_tokens=False)
        where = ", held out" if document.held_out else ""
        stdout.rule(f"{document.kind}, temperature {document.temperature:.2f}{where}")
        stdout.print(prompt, style="dim", markup=False, end="")
        stdout.print(answer, markup=False)
