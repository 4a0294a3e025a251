"""`foreword train data` and `foreword train join`."""

from dataclasses import dataclass
from pathlib import Path

from foreword.cli.console import say
from foreword.cli.options.grouped import REQUIRED, Command, argument, flag, late, option
from foreword.cli.options.model import DEFAULT_MODEL, DeviceOption, ModelOption
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
        if self.show is None and self.minutes is None and self.tokens is None:
            raise RequestError("say how much to write: --minutes or --tokens")
        if self.show is None and self.only_prompts and not self.prompts:
            raise RequestError("--only-prompts needs --prompts")
        from foreword.cli.train.session import run_writing, show_texts

        if self.show is None:
            run_writing(self)
        else:
            show_texts(self.out, self.model, self.show)


@dataclass(frozen=True, kw_only=True)
class Join(Command):
    """Join the files of an --export.

    Example: foreword train join pieces head
    """

    pieces: Path = argument(REQUIRED, "Directory written by --export.")
    out: Path = argument(REQUIRED, "New directory.")
    model: ModelOption = DEFAULT_MODEL

    def run(self) -> None:
        from foreword.models.formats.checkpoint import open_checkpoint
        from foreword.models.sources.resolve import resolve_model
        from foreword.train.loop.output import join_pieces

        join_pieces(self.pieces, self.out, open_checkpoint(resolve_model(self.model)))
        say(f"{self.out}: {sum(path.stat().st_size for path in self.out.iterdir()) / 1e6:.1f} MB")
