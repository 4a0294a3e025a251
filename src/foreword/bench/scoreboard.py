"""Makes a Markdown page that compares engines, from the JSON files that benchmarks wrote."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from foreword.bench.contestants import OURS
from foreword.errors import RequestError

HEAD = (files("foreword.bench") / "data" / "scoreboard.md").read_text(encoding="utf-8")
"""The beginning of the page."""


class _Measure(NamedTuple):
    """A column of the table of speeds."""

    heading: str
    field: str  # key of the value in a row of the file
    sign: int  # 1: more is better; -1: less is better
    form: str  # format of the value after division by `unit`
    unit: int = 1
    is_bold: bool = True  # whether the best value is bold

    def shown(self, value: float) -> str:
        return self.form.format(value / self.unit)


_MEASURES = (
    _Measure("tokens/s", "tokens_per_second", 1, "{:,.0f}"),
    _Measure("same text", "same_as_plain", 1, "{:.0%}", is_bold=False),
    _Measure("first token", "first_ms", -1, "{:,.0f} ms"),
    _Measure("memory", "peak_bytes", -1, "{:,.0f} MiB", unit=2**20),
)


def scoreboard_page(folder: Path) -> str:
    """Return the page as Markdown; `folder` has the result files."""
    results = {path: _read(path) for path in sorted(folder.glob("*.json"))}
    if not results:
        raise RequestError(
            f"{folder} has no result files; write them with foreword bench scoreboard --measure"
        )
    parts = ["\n".join(_speeds(path, result)) for path, result in results.items() if "rows" in result]
    examined = [(path, result) for path, result in results.items() if "verdicts" in result]
    for title, group in groupby(examined, key=lambda pair: _title(pair[1])):
        parts.append("\n".join(_verdicts(title, list(group))))
    return "\n".join([HEAD, *parts])


def _read(path: Path) -> dict[str, Any]:
    """Return a result file; raise `RequestError` if a field that the page needs is missing."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name in ("command", "date", "machine"):
            if name not in result["made"]:
                raise KeyError(name)
        if "rows" not in result and "verdicts" not in result:
            raise KeyError("rows or verdicts")
    except KeyError as error:
        raise RequestError(f"{path} has no {error}; it must be what a benchmark wrote, with `made`") from None
    except (ValueError, TypeError) as error:
        raise RequestError(f"{path} is not a result file: {error}") from None
    return result


def _title(result: Mapping[str, Any]) -> str:
    return str(result["title"] if "title" in result else result["model"])


def _origin(path: Path, made: Mapping[str, str]) -> str:
    facts = "; ".join(str(made[name]) for name in ("date", "machine", "load", "versions") if name in made)
    return f"`{made['command']}`: {facts}. Raw data: `{path.name}`."


def _speeds(path: Path, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a section with the speeds of all engines, from a result of `bench compare`."""
    rows: list[Mapping[str, Any]] = result["rows"]
    yield from (f"## {_title(result)}", "", _origin(path, result["made"]), "")
    best = {measure.field: _best(rows, measure) for measure in _MEASURES}
    measured = [measure for measure in _MEASURES if best[measure.field] is not None]
    cells = [(row["label"], [_cell(row, measure, best) for measure in measured]) for row in rows]
    yield from _table([measure.heading for measure in measured], cells)
    yield from ("", _where_others_lead(rows))
    yield from (f"- not measured: {reason}" for reason in result.get("absent", ()))
    yield ""
    if len(categories := result.get("categories", {})) > 1:
        yield from _by_category(categories)


def _best(rows: Sequence[Mapping[str, Any]], measure: _Measure) -> float | None:
    values = [row[measure.field] for row in rows if row.get(measure.field) is not None]
    return max(values, key=lambda value: measure.sign * value, default=None)


def _cell(row: Mapping[str, Any], measure: _Measure, best: Mapping[str, float | None]) -> str:
    """Return a cell's text, which is bold if its value is the best of the column."""
    value = row.get(measure.field)
    if value is None:
        return ""
    is_best = value == best[measure.field] and measure.is_bold
    return f"**{measure.shown(value)}**" if is_best else measure.shown(value)


def _where_others_lead(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line that names every column in which an engine is better than each of our rows."""
    our_rows = [row for row in rows if row["label"].split()[0] == OURS]
    columns = []
    for measure in _MEASURES:
        best, ours = _best(rows, measure), _best(our_rows, measure)
        if best is not None and ours is not None and measure.sign * best > measure.sign * ours:
            leader = next(row["label"] for row in rows if row.get(measure.field) == best)
            figures = f"{leader} {measure.shown(best)}, foreword {measure.shown(ours)}"
            columns.append(f"{measure.heading} ({figures})")
    return f"Others are better in: {', '.join(columns) or 'no column of this table'}."


def _by_category(categories: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield a table of tokens per second; `categories` has them by category, then by engine."""
    yield from ("Tokens/s by kind of prompt:", "")
    cells: dict[str, list[str]] = {label: [] for label in next(iter(categories.values()))}
    for speeds in categories.values():
        for label, row in cells.items():
            shown = f"{speeds[label]:,.1f}"
            row.append(f"**{shown}**" if speeds[label] == max(speeds.values()) else shown)
    yield from _table([name.replace("_", " ") for name in categories], cells.items())
    yield ""


def _table(
    headings: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], corner: str = "engine"
) -> Iterator[str]:
    """Yield a Markdown table with one line per row (label, cells); `corner` is the heading of the labels."""
    yield from (f"| {corner} | {' | '.join(headings)} |", "| --- " * (len(headings) + 1) + "|")
    yield from (f"| {label} | {' | '.join(cells)} |" for label, cells in rows)


def _verdicts(title: str, results: Sequence[tuple[Path, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield a table of checks by engines, and the reason for each engine that could not be examined."""
    yield from (f"## {title}: `foreword prove --url`", "")
    for path, result in results:
        absent = "".join(f" Not examined: {reason}." for reason in result.get("absent", ()))
        yield f"- {_engine(result)}: {_origin(path, result['made'])}{_extent(result)}{absent}"
    examined = [result for _, result in results if result["verdicts"]]
    columns = [{one["check"]: one["verdict"] for one in result["verdicts"]} for result in examined]
    checks = dict.fromkeys(one["check"] for result in examined for one in result["verdicts"])
    rows = [(check, [column.get(check, "not tried") for column in columns]) for check in checks]
    yield ""
    yield from _table(list(map(_engine, examined)), rows, corner="check")
    yield ""
    explained = [line for result in examined for line in _explained(result)]
    yield from ([*explained, ""] if explained else [])


def _extent(result: Mapping[str, Any]) -> str:
    """Return the size and the duration of an examination."""
    if not result["verdicts"]:
        return ""
    took = f" in {result['seconds']:.0f} s" if "seconds" in result else ""
    return f" Size: {result['plan']}, {result['requests_made']} requests{took}."


def _explained(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per reason why claims were refuted, not tried, or held up to rounding only."""
    reasons: dict[str, list[str]] = {}
    for one in result["verdicts"]:
        if one["verdict"] not in ("held", "not refuted"):
            reasons.setdefault(f"{one['verdict']}: {one['detail']}", []).append(one["check"])
    yield from (f"- {_engine(result)}: {', '.join(checks)}: {why}" for why, checks in reasons.items())


def _engine(result: Mapping[str, Any]) -> str:
    return str(result.get("engine", _title(result)))
