"""Building blocks of benchmarks: interleaved arms, ratios with bounds, tables, JSON input, child processes.

An arm is one of the variants that a benchmark compares. A benchmark maps names of arms to functions that measure one
sample, and calls `take_turns`. It turns the samples into rows: frozen dataclasses. Their fields are the JSON output;
fields annotated with `InTable` are also the columns of the table.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, TypeVar, get_type_hints

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from foreword.errors import RequestError
from foreword.progress import Progress, StageProgress

RESAMPLES = 2000  # bootstrap samples
STOP_SECONDS = 60  # seconds that a child process has to stop before it is killed
ENGINE_PAUSE = 0.05  # seconds between samples of different engines, whose threads may still spin
PLAIN = "plain"  # label of decoding without a drafter

Sample = TypeVar("Sample")
Item = TypeVar("Item")
_Parsed = TypeVar("_Parsed")


def take_turns(
    arms: Mapping[str, Callable[[int], Sample]],
    rounds: int,
    progress: Progress | None = None,
    *,
    warm_up: int = 1,
    alternate: bool = False,
) -> dict[str, list[Sample]]:
    """Return `rounds` samples per arm; every round runs all arms once, so that slow periods affect them alike.

    `warm_up` more rounds come first and do not count. An arm is called with the round's number, which is negative while
    warming up. With `alternate`, every second round runs the arms in reverse order, so that a drift favours no arm.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    done, total = 0, (warm_up + rounds) * len(arms)
    for number in range(-warm_up, rounds):
        order = list(arms)
        if alternate and number % 2 == 0:
            order.reverse()
        for name in order:
            sample = arms[name](number)
            if number >= 0:
                samples[name].append(sample)
            done += 1
            if progress is not None:
                progress(done, total)
    return samples


def stage_of(progress: StageProgress, stage: str, index: int, stages: int) -> Progress:
    """Return the (done, total) callback of stage `index` of several equally long stages."""
    return lambda done, total: progress(stage, index * total + done, stages * total)


def staged(
    items: Iterable[Item], progress: StageProgress, name: Callable[[Item], str] = str
) -> Iterator[Item]:
    """Yield the items, and report each as a stage of the progress; `name` returns the stage's name."""
    listed = list(items)
    for index, item in enumerate(listed):
        progress(name(item), index, len(listed))
        yield item


@dataclass(frozen=True)
class Interval:
    """A mean ratio and its confidence bounds."""

    low: float
    middle: float
    high: float


def ratios_by_round(rates: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return rate / baseline of every round."""
    return [rate / base for rate, base in zip(rates, baseline, strict=True)]


def median_ratio(rates: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median over the rounds of rate / baseline."""
    return median(ratios_by_round(rates, baseline))


def bootstrap(ratios: Sequence[float], confidence: float, seed: int = 0) -> Interval:
    """Return the geometric mean of the ratios with bootstrap bounds."""
    logs, rng = [log(ratio) for ratio in ratios], Random(seed)
    means = sorted(fmean(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    outside = int(RESAMPLES * (1 - confidence) / 2)  # resampled means beyond each bound
    return Interval(exp(means[outside]), exp(fmean(logs)), exp(means[-1 - outside]))


def joint_confidence(confidence: float, intervals: int) -> float:
    """Return the confidence of each interval so that all hold together with `confidence` (Bonferroni)."""
    return 1 - (1 - confidence) / max(intervals, 1)


@dataclass(frozen=True)
class BestFixed:
    """The fastest of the arms with a fixed setting, such as one draft depth, and the ratio of an adaptive arm to it.

    Even rounds choose the fastest arm, odd rounds give the ratio.
    """

    label: str
    ratio: Interval


def against_best(
    rates: Mapping[str, Sequence[float]], label: str, fixed: Sequence[str], confidence: float
) -> BestFixed:
    """Return the fastest of the `fixed` arms, and the ratio of the arm `label` to it; `rates` are by arm and round.

    The fastest arm is chosen in even rounds and compared in odd ones: chance favours it in the rounds that chose it.
    """
    best = max(fixed, key=lambda arm: sum(map(log, rates[arm][::2])))
    return BestFixed(best, bootstrap(ratios_by_round(rates[label][1::2], rates[best][1::2]), confidence))


Column = str | Callable[[Any], str | Text]
"""A table cell: a format of attributes such as "{.ms:.2f}", or a function. Strings are plain text, never markup."""


@dataclass(frozen=True)
class InTable:
    """Annotation of a field of a dataclass of rows: it is a column of their table, under this heading.

    `form` is the format of the value, such as ".2f", or a function that returns the cell. None is shown as "-".
    """

    heading: str
    form: str | Callable[[Any], str | Text] = ""


def columns_of(rows: Sequence[object]) -> dict[str, Column]:
    """Return the columns of rows whose fields are annotated with `InTable`."""
    columns: dict[str, Column] = {}
    for name, hint in get_type_hints(type(rows[0]), include_extras=True).items() if rows else ():
        for shown in getattr(hint, "__metadata__", ()):
            if isinstance(shown, InTable):
                columns[shown.heading] = partial(_field_cell, name, shown.form)
    return columns


def _field_cell(name: str, form: str | Callable[[Any], str | Text], row: object) -> str | Text:
    value = getattr(row, name)
    return form(value) if callable(form) else optional(value, form)


def cells_of(rows: Iterable[object], columns: Mapping[str, Column]) -> list[list[str]]:
    """Return the text of every cell, by row."""
    return [[cell.plain for cell in line] for line in _lines(rows, columns)]


def _lines(rows: Iterable[object], columns: Mapping[str, Column]) -> list[list[Text]]:
    values = [
        [cell.format(row) if isinstance(cell, str) else cell(row) for cell in columns.values()]
        for row in rows
    ]
    return [[Text(value) if isinstance(value, str) else value for value in line] for line in values]


def table(rows: Iterable[object], columns: Mapping[str, Column], title: str | None = None) -> Table:
    """Return a table with one line per row; numeric columns are right-aligned."""
    lines = _lines(rows, columns)
    heading = None if title is None else Text(title)
    filled = Table(title=heading, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")
    for index, name in enumerate(columns):
        cells = [line[index].plain for line in lines]
        if all(cell[:1] in "-0123456789" for cell in cells):  # numbers do not wrap, headings may
            filled.add_column(name, justify="right", min_width=max(map(len, cells), default=0))
        else:
            filled.add_column(name, overflow="fold")
    for line in lines:
        filled.add_row(*line)
    return filled


def check_least(least: int, **options: int | None) -> None:
    """Raise `RequestError` if an option is below `least`; options that are None were not given."""
    for name, value in options.items():
        if value is not None and value < least:
            raise RequestError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")


def ratio(dividend: float, divisor: float) -> float:
    """Return the quotient; 0 if the divisor is 0."""
    return dividend / divisor if divisor else 0.0


def optional(value: object, form: str, without: str = "-") -> str:
    """Return the value in the format `form`; `without` for None."""
    return without if value is None else format(value, form)


def read_output(option: str, path: Path, command: str, parse: Callable[[Any], _Parsed]) -> _Parsed:
    """Return what `parse` makes of a command's JSON output; raise `RequestError` for other files.

    The file may have a table before the JSON. `option` and `command` are for the error.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} {path} cannot be read: {error}") from None
    try:
        return parse(_last_object(text))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise RequestError(f"{option} {path} is not the output of `{command}`") from None


@contextmanager
def started_command(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run `foreword` with these arguments within the block; yield its first line and its process id."""
    environment = {name: value for name, value in os.environ.items() if name != "FOREWORD_API_KEY"}
    command = [sys.executable, "-m", "foreword", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline(), process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def command_json(name: str, options: Sequence[str], exit_codes: Sequence[int] = (0,)) -> dict[str, Any]:
    """Return the JSON output of a `foreword` command; raise `RequestError` for other exit codes."""
    command = [sys.executable, "-m", "foreword", *name.split(), *options, "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode not in exit_codes:
        raise RequestError(f"foreword {name} ended with exit code {process.returncode}")
    output: dict[str, Any] = json.loads(process.stdout)
    return output


def _last_object(text: str) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return the JSON value that is the whole text, or its last line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return json.loads(text.strip().rpartition("\n")[2])
