"""Output of the commands: consoles, progress bars, tables and JSON; and loading models with a progress bar."""

import json
import logging
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from foreword.bench.skeleton import Column, columns_of, table
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


def log_to_stderr(level: int = logging.INFO) -> None:
    """Write log lines from this level on to standard error."""
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


def visible(text: str) -> str:
    """Return the text without control characters except newline and tab."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


after_loading: Callable[[], object] = lambda: None  # noqa: E731 - a hook
"""Called after a model was loaded; a command that owns its process freezes garbage collection then."""


LINE_SECONDS = 2.0  # minimum seconds between two progress lines in a log


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
    """Show progress that takes long: a bar on a terminal, percentages in a log."""
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

    with loading_bar() as on_stage:
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


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


def print_table(
    rows: Sequence[Any], columns: Mapping[str, Column] | None = None, title: str | None = None
) -> None:
    """Print the rows as a table; by default its columns are the fields that are annotated with `InTable`."""
    stdout.print(table(rows, columns_of(rows) if columns is None else columns, title))


def fields_of(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the rows, which are dataclasses, as JSON objects."""
    return [asdict(row) for row in rows]
