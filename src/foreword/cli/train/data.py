"""`foreword train data` and `foreword train join`."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import typer

from foreword.cli.console import DEFAULT_MODEL, DeviceOption, ModelOption, stage_bar, stdout
from foreword.cli.options.grouped import REQUIRED, Command, argument, flag, late, option
from foreword.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class WorkOptions(Command):
    """Model, device and prompts."""

    model: ModelOption = late(DEFAULT_MODEL, -1)
    prompts: list[Path] | None = option(None, "JSON lines with prompts to answer as well; repeatable.")
    compiled: bool = option(True, "Compile the training pass (on a GPU).", last=2)
    device: DeviceOption = late("auto", 2)


@dataclass(frozen=True, kw_only=True)
class Data(WorkOptions):
    """Write training texts with the model itself.

    Example: foreword train data texts --minutes 2
    """

    out: Path = argument(REQUIRED, "Directory of the shards; new ones are added.")
    only_prompts: bool = flag("Answer only the prompts of --prompts.")
    minutes: float | None = option(None, "Minutes to write.", min=0.01)
    tokens: int | None = option(None, "Answer tokens to write.", min=1)
    rows: int | None = option(None, "Texts written at once (batch size).", min=1)
    context: int = option(1280, "Most tokens of prompt and answer.", min=32)
    seed: int | None = option(None, "Random seed. Default: the number of shards in the directory.", min=0)
    show: int | None = option(None, "Print this many of the texts and write nothing.", min=1)

    def run(self) -> None:
        if self.show is not None:
            _show(self.out, self.model, self.show)
            return
        if self.minutes is None and self.tokens is None:
            raise RequestError("say how much to write: --minutes or --tokens")
        if self.only_prompts and not self.prompts:
            raise RequestError("--only-prompts needs --prompts")
        from foreword.cli.train import session
        from foreword.train.files import require_directory
        from foreword.train.texts.data import WritingSettings
        from foreword.train.texts.documents import count_shards, require_written_by

        require_directory(self.out)
        prompts = session.read_prompts(self.prompts)
        place = session.TrainingTarget(self.model, self.device, compiled=self.compiled)
        require_written_by(self.out, place.identity)
        memory = session.memory_in_one_line("give fewer --rows")
        with session.stop_signals() as stopped, memory, stage_bar() as bar:
            settings = WritingSettings(
                context=self.context,
                seconds=None if self.minutes is None else 60 * self.minutes,
                answer_tokens=self.tokens,
                only_prompts=self.only_prompts,
                seed=count_shards(self.out) if self.seed is None else self.seed,
                stop=stopped,
            )
            watcher = session.ConsoleWatcher(bar)
            session.write_texts(place, self.out, settings, prompts, self.rows, watcher)
        if stopped():
            raise typer.Exit(session.STOPPED)


@dataclass(frozen=True, kw_only=True)
class Join(Command):
    """Join the files of an --export.

    Example: foreword train join pieces head
    """

    pieces: Path = argument(REQUIRED, "Directory written by --export.")
    out: Path = argument(REQUIRED, "New directory.")
    model: ModelOption = DEFAULT_MODEL

    def run(self) -> None:
        from foreword.cli.train.session import say
        from foreword.models.formats.checkpoint import open_checkpoint
        from foreword.models.sources.resolve import resolve_model
        from foreword.train.loop.output import join_pieces

        join_pieces(self.pieces, self.out, open_checkpoint(resolve_model(self.model)))
        say(f"{self.out}: {sum(path.stat().st_size for path in self.out.iterdir()) / 1e6:.1f} MB")


def _show(directory: Path, model: str, count: int) -> None:
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.sources.resolve import resolve_model
    from foreword.train.files import identity_of
    from foreword.train.texts.documents import count_shards, read_shards, require_written_by

    if not count_shards(directory):
        raise RequestError(f"{directory} has no training texts; write some with --minutes or --tokens")
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
