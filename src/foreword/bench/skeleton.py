"""Building blocks of benchmarks: interleaved arms, ratios with bounds, tables, JSON input, child processes.

An arm is one of the variants that a benchmark compares. A benchmark maps names of arms to functions that measure one
sample, and calls `take_turns`. It turns the samples into rows, frozen dataclasses whose fields are
its JSON output. `table` formats the rows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.errors import RequestError
from foreword.progress import Progress, StageProgress

RESAMPLES = 2000  # bootstrap samples
STOP_SECONDS = 60  # seconds that a child process has to stop before it is killed
ENGINE_PAUSE = 0.05  # seconds between samples of different engines, whose threads may still spin
PLAIN = "plain"  # label of decoding without a drafter

Sample = TypeVar("Sample")
Item = TypeVar("Item")
_Found = TypeVar("_Found")


def take_turns(
    arms: Mapping[str, Callable[[int], Sample]],
    rounds: int,
    progress: Progress | None = None,
    *,
    warm_up: int = 1,
    alternate: bool = False,
) -> dict[str, list[Sample]]:
    """Return `rounds` samples per arm; every round runs all arms once, so that slow periods affect them alike.

    Warm-up rounds do not count. An arm is called with its round number, which is negative while warming up. With
    `alternate`, every other round runs backwards, so that a drift favours no arm.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    whole = (warm_up + rounds) * len(arms)
    for number in range(-warm_up, rounds):
        order = list(arms.items())
        for turn, (name, run) in enumerate(reversed(order) if alternate and number % 2 == 0 else order, 1):
            sample = run(number)
            if number >= 0:
                samples[name].append(sample)
            if progress is not None:
                progress((number + warm_up) * len(arms) + turn, whole)
    return samples


def stage_of(progress: StageProgress, stage: str, place: int, places: int) -> Progress:
    """Return the progress callback of one of several equally long stages."""
    return lambda done, whole: progress(stage, place * whole + done, places * whole)


def staged(
    items: Iterable[Item], progress: StageProgress, name: Callable[[Item], str] = str
) -> Iterator[Item]:
    """Yield the items; each is one stage of the progress, with this name."""
    every = list(items)
    for place, item in enumerate(every):
        progress(name(item), place, len(every))
        yield item


@dataclass(frozen=True)
class Interval:
    """A mean ratio and its confidence bounds."""

    low: float
    middle: float
    high: float


def neighbours(rates: Sequence[float], beside: Sequence[float]) -> list[float]:
    """Return rate / beside for every round."""
    return [one / other for one, other in zip(rates, beside, strict=True)]


def median_ratio(rates: Sequence[float], beside: Sequence[float]) -> float:
    """Return the median over the rounds of rate / beside."""
    return median(neighbours(rates, beside))


def bootstrap(ratios: Sequence[float], confidence: float, seed: int = 0) -> Interval:
    """Return the geometric mean of the ratios with bootstrap bounds."""
    logs, rng = [log(ratio) for ratio in ratios], Random(seed)
    means = sorted(fmean(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    outside = int(RESAMPLES * (1 - confidence) / 2)
    return Interval(exp(means[outside]), exp(fmean(logs)), exp(means[-1 - outside]))


def together(confidence: float, cells: int) -> float:
    """Return the confidence that each of `cells` intervals needs for a joint confidence (Bonferroni)."""
    return 1 - (1 - confidence) / max(cells, 1)


@dataclass(frozen=True)
class BestFixed:
    """The best fixed arm, and the ratio of another arm to it. Each comes from its own half of the rounds."""

    label: str
    ratio: Interval


def against_best(
    rates: Mapping[str, Sequence[float]], own: str, others: Sequence[str], confidence: float
) -> BestFixed:
    """Return the best of the other arms and the ratio of `own` to it.

    The best arm is chosen in even rounds and compared in odd ones: chance favours it in the rounds that chose it.
    """
    best = max(others, key=lambda label: sum(map(log, rates[label][::2])))
    return BestFixed(best, bootstrap(neighbours(rates[own][1::2], rates[best][1::2]), confidence))


Column = str | Callable[[Any], str]  # a table cell: a format of attributes such as "{.ms:.2f}", or a function


def cells_of(rows: Iterable[object], columns: Mapping[str, Column]) -> list[list[str]]:
    """Return the text of every cell, by row."""
    return [
        [cell.format(row) if isinstance(cell, str) else cell(row) for cell in columns.values()]
        for row in rows
    ]


def table(rows: Iterable[object], columns: Mapping[str, Column], title: str | None = None) -> Table:
    """Return a table with one line per row; numeric columns are right-aligned."""
    lines = cells_of(rows, columns)
    found = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")
    for place, name in enumerate(columns):
        cells = [line[place] for line in lines]
        if all(cell[:1] in "-0123456789" for cell in cells):  # numbers do not wrap, headings may
            found.add_column(name, justify="right", min_width=max(map(len, cells), default=0))
        else:
            found.add_column(name, overflow="fold")
    for line in lines:
        found.add_row(*line)
    return found


def check_least(least: int, **options: int | None) -> None:
    """Raise `RequestError` for an option below this number; None: it is not given."""
    for name, value in options.items():
        if value is not None and value < least:
            raise RequestError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")


def ratio(part: float, whole: float) -> float:
    """Return the quotient; 0 if the divisor is 0."""
    return part / whole if whole else 0.0


def optional(value: float | None, form: str, without: str = "-") -> str:
    """Return the formatted figure; `without` for None."""
    return without if value is None else format(value, form)


def read_output(option: str, path: Path, command: str, understand: Callable[[Any], _Found]) -> _Found:
    """Read a command's JSON output, with or without a table before it; refuse other files."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} {path} cannot be read: {error}") from None
    try:
        return understand(_last_object(text))
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


def command_json(name: str, options: Sequence[str], fine: Sequence[int] = (0,)) -> dict[str, Any]:
    """Return the JSON output of a `foreword` command; refuse exit codes that are not `fine`."""
    command = [sys.executable, "-m", "foreword", *name.split(), *options, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in fine:
        raise RequestError(f"foreword {name} ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _last_object(text: str) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return json.loads(text.strip().rpartition("\n")[2])
