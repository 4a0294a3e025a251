"""Common parts of the commands: consoles, progress bars, loading, JSON output."""

import json
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from foreword.cli.options.common import (
    BACKENDS,
    DTYPES,
    KV_DTYPES,
    QUANTIZATIONS,
    check_device,
    check_model,
    check_plot,
    choices,
)
from foreword.cli.options.grouped import Command, late, option
from foreword.errors import RequestError
from foreword.progress import StageProgress

if TYPE_CHECKING:
    from foreword.engine.config import EngineConfig
    from foreword.engine.llm import LLM

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def say(*lines: str, to: Console = stdout) -> None:
    """Print lines of plain text, which do not wrap."""
    for line in lines:
        to.print(line, markup=False, soft_wrap=True)


def note(*lines: str) -> None:
    """Print lines of plain text to standard error."""
    say(*lines, to=stderr)


def visible(text: str) -> str:
    """Return the text without control characters except newline and tab."""
    return "".join(one for one in text if one in "\n\t" or unicodedata.category(one) != "Cc")


def nothing() -> None:
    """Do nothing."""


after_loading: Callable[[], object] = nothing
"""Called after a model was loaded; a command that owns its process freezes garbage collection then."""


def leave_stdout_to_json(wanted: bool) -> bool:
    """With --json, reserve standard output for the object: tables go to standard error."""
    stdout.stderr = wanted
    return wanted


_MODEL_HELP = "Model: built-in name, .gguf file, Hugging Face directory or hub id such as org/name."


def _complete_model(incomplete: str) -> list[str]:
    """Return the built-in models that begin so, for shell completion; without one, the shell completes paths."""
    from foreword.models.sources.builtin import BUILTIN_MODELS

    return [model.name for model in BUILTIN_MODELS if model.name.startswith(incomplete)]


_checked_model: dict[str, Any] = {
    "callback": check_model,
    "autocompletion": _complete_model,
    "help": _MODEL_HELP,
}
ModelOption = Annotated[str, typer.Option("--model", "-m", **_checked_model)]
ModelArgument = Annotated[str, typer.Argument(**_checked_model)]
_DTYPE_HELP = (
    "Data type: auto, float32, bfloat16, float16; on the CPU kernels int8, stored, q8_0, float32. "
    "`foreword doctor` shows what auto is."
)
_WEIGHTS_HELP = "Weights on a GPU: auto (as the checkpoint has them), none (unpacked), fp8 or int4."
_KV_HELP = "Keys and values: auto; float32, bfloat16 or int8 on a CPU; fp8 on a GPU."
DtypeOption = Annotated[str, choices("--dtype", DTYPES, _DTYPE_HELP)]
BackendOption = Annotated[str, choices("--backend", BACKENDS, "Backend: auto, cpu, cuda or torch.")]
QuantizationOption = Annotated[str, choices("--quantization", QUANTIZATIONS, _WEIGHTS_HELP)]
KvDtypeOption = Annotated[str, choices("--kv-cache-dtype", KV_DTYPES, _KV_HELP)]
DeviceOption = Annotated[str, typer.Option(callback=check_device, help="Device: auto, cpu, cuda or cuda:1.")]
JsonOption = Annotated[
    bool,
    typer.Option("--json", callback=leave_stdout_to_json, help="Print JSON; tables go to standard error."),
]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Device, data type and backend of a model."""

    dtype: DtypeOption = late("auto", 2)
    device: DeviceOption = late("auto", 2)
    backend: BackendOption = late("auto", 2)
    quantization: QuantizationOption = late("auto", 2)
    kv_cache_dtype: KvDtypeOption = late("auto", 2)

    @property
    def place(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(DeviceOptions)}


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(DeviceOptions):
    """Place options of a model that may be divided between processes."""

    tensor_parallel_size: int = option(1, "Processes that split the model, one per GPU.", min=1, last=2)


def plot_option(text: str = "Draw the curves into this PNG file.") -> Any:  # noqa: ANN401
    return option(None, text, callback=check_plot, last=1)


DEFAULT_MODEL = "smollm2-135m"

LINE_SECONDS = 2.0
"""Minimum seconds between two progress lines in a log."""


@contextmanager
def stage_bar(*, is_long: bool = False) -> Iterator[StageProgress]:
    """Show a transient bar on standard error; yield a function that takes (stage, done, total).

    With `is_long`, print a line per stage if standard error is a file or a pipe.
    """
    if is_long and not stderr.is_terminal:
        yield _stage_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # A transient bar would leave empty lines in a file or a pipe.
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None, visible=True)

        yield show


def _stage_lines() -> StageProgress:
    newest = ""

    def show(stage: str, done: int, total: int) -> None:
        nonlocal newest
        if stage != newest:
            newest = stage
            note(f"{stage} ({done} of {total})" if total else stage)

    return show


@contextmanager
def loading_bar() -> Iterator[StageProgress]:
    """Show the progress of a server's start: a bar on a terminal, percentages in a log."""
    if not stderr.is_terminal:
        yield percent_lines(note)
        return
    with stage_bar() as show:
        yield show


def percent_lines(write: Callable[[str], object], clock: Callable[[], float] = monotonic) -> StageProgress:
    """Return a progress function that writes lines such as "loading: 40%".

    A stage gets a line at its end, and one per tenth before, at most one in `LINE_SECONDS`.
    """
    stage, tenths, written_at = "", 0, clock()

    def show(new_stage: str, done: int, total: int) -> None:
        nonlocal stage, tenths, written_at
        if new_stage != stage:
            stage, tenths = new_stage, 0
        reached = 10 * done // total if total else 0
        is_due = reached == 10 or clock() - written_at >= LINE_SECONDS
        if reached > tenths and is_due:
            tenths, written_at = reached, clock()
            write(f"{stage}: {10 * tenths}%")

    return show


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a transient bar for one task; yield a function that takes (done, total)."""
    with stage_bar() as show:
        yield partial(show, title)


def fetched(model: str) -> Path:
    """Return a model's path; fetch it if needed, with a progress bar."""
    from foreword.models.sources.resolve import resolve_model

    with stage_bar() as on_stage:
        return resolve_model(model, on_progress=on_stage)


def load_llm(
    model: str,
    *,
    config: "EngineConfig | None" = None,
    answers: int | None = None,
    **options: Any,  # noqa: ANN401 - of several types
) -> "LLM":
    """Fetch the model if needed and load it with these options of `LLM`, with progress bars.

    Speculation and the model's sampling defaults are off unless given. `answers` is the number of concurrent answers:
    a GPU is prepared for no more.
    """
    path = fetched(model)
    from foreword.engine.config import EngineConfig  # imports torch
    from foreword.engine.llm import LLM

    config = config or EngineConfig()
    if answers is not None:
        config = replace(config, max_num_seqs=min(answers, config.max_num_seqs))
    with stage_bar() as on_stage:
        llm = LLM(
            str(path),
            **{"speculation": None, "generation_config": "none", **options},
            config=config,
            progress=partial(on_stage, f"loading {model}"),
            preparing=partial(on_stage, "preparing passes"),
        )
    after_loading()
    return llm


@dataclass(frozen=True, kw_only=True)
class JsonCommand(Command):
    """A command with --json."""

    as_json: JsonOption = late(False, 3)

    def show_json(self, value: dict[str, Any]) -> None:
        if self.as_json:
            print_json(value)


@dataclass(frozen=True, kw_only=True)
class ModelCommand(DeviceOptions, JsonCommand):
    """A command for a loaded model."""

    model: ModelOption = late(DEFAULT_MODEL, -1)

    def load(self, speculation: str | None = None, config: "EngineConfig | None" = None) -> "LLM":
        return load_llm(self.model, **self.place, speculation=speculation, config=config)


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


def parse_sizes(option: str, text: str, least: int | None = None) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(f"{option} takes numbers separated by commas, not {text!r}") from error
    if least is not None and min(found) < least:
        raise RequestError(f"{option} takes numbers from {least} on")
    return found
