"""`foreword top` and `foreword advise`: speculation on a server."""

import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foreword.cli.console import fields_of, print_json, say, stdout
from foreword.cli.learn import fetch_learning, summary
from foreword.cli.options.common import JsonOption
from foreword.cli.server_client import DEFAULT_URL, KeyOption, ServerRefusal, UrlOption, call_server
from foreword.control.reporting import reading
from foreword.control.reporting.advising import advise as advice
from foreword.control.reporting.advising import without_advice
from foreword.control.reporting.figures import ControlReport, PairReport
from foreword.engine.learning import LearningReport

SHOWN_DECISIONS = 8

_REASONS = {404: "it does not report speculation (--hide-speculation, or an older version)"}


def fetch_report(url: str, api_key: str | None) -> ControlReport:
    """Return a server's report; raise `RequestError` on failure."""
    return reading.from_json(call_server(url, "/speculation", api_key, reasons=_REASONS))


def _fetch_learning(url: str, api_key: str | None) -> LearningReport | None:
    """Return a server's report on the training of its head; None if it does not train it."""
    try:
        return fetch_learning(url, api_key)
    except ServerRefusal as refusal:
        if refusal.status == 404:
            return None
        raise


COLUMNS = {
    "gain": "speed relative to plain decoding; with ?: expected, not yet measured",
    "depth": "levels of a draft worth verifying / levels drafted",
    "accepted": "acceptance rate of the first two levels",
    "break-even": "acceptance rate from which drafting is faster at this batch",
    "coverage": "share of draft requests that got a draft",
    "draft ms": "time per draft request",
    "run": "draft tokens accepted per pass, median / 90th percentile",
}
"""Columns of figures, and their meaning."""


def report_view(report: ControlReport, learning: LearningReport | None = None) -> RenderableType:
    """Return all tables and lines, pairs of drafter and cohort first; `learning`: of a head that is trained."""
    shown: list[RenderableType] = ["no drafter has received a draft request yet"]
    if report.pairs:
        reasons = (f"{pair.drafter} for {pair.cohort}: {_reason(pair)}" for pair in report.pairs)
        shown = [_pairs(report), _legend(), "\n".join(reasons)]
    learned = [] if learning is None else [Text(summary(learning))]
    return Group(_title(report), *shown, _engine(report), *learned, _decisions(report))


def _legend() -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for name, meaning in COLUMNS.items():
        table.add_row(name, meaning, style="dim")
    return table


def _title(report: ControlReport) -> str:
    switch = "on" if report.enabled else "switched off for all requests"
    file = f", policy {report.policy_file}" if report.policy_file else ""
    return f"speculation {switch}{file}: batch {report.batch:.0f}, plain step {report.step_ms:.2f} ms"


def _pairs(report: ControlReport) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=False)
    for name, width in (("drafter", 7), ("cohort", 6), ("state", 6)):
        table.add_column(name, overflow="fold", min_width=width)
    for name in COLUMNS:
        table.add_column(name.replace("-", "-\n").replace(" ", "\n"), justify="right", no_wrap=True)
    for pair in report.pairs:
        table.add_row(*_cells(pair))
    return table


def _cells(pair: PairReport) -> list[str]:
    """Return the line of a drafter and a cohort."""
    state = pair.state if pair.state != "canary" else f"canary {pair.percent:g}%"
    is_idle = not pair.in_use and pair.state in ("on", "canary")
    return [
        pair.drafter,
        pair.cohort,
        f"{state}, not now" if is_idle else state,
        _gain(pair),
        f"{pair.kept}/{pair.depth}" if pair.depth else "-",
        " ".join(f"{rate:.2f}".lstrip("0") for rate in pair.acceptance_by_level[:2]) or "-",
        "-" if pair.break_even is None else f"{pair.break_even:.2f}",
        "-" if pair.coverage is None else f"{pair.coverage:.0%}",
        f"{pair.draft_ms:.2f}",
        f"{pair.run_p50:g}/{pair.run_p90:g}",
    ]


def _gain(pair: PairReport) -> str:
    """Return the measured gain, or the expected one with a question mark."""
    if pair.measured is not None:
        return f"{pair.measured.mean:.2f}×"
    return "-" if pair.predicted is None else f"{pair.predicted.mean:.2f}×?"


def _engine(report: ControlReport) -> str:
    """Return one line about the whole engine: exploration, utilisation, KV memory and cost."""
    usage = report.usage
    parts = [
        f"exploration {report.probe_share:.2%} of the time",
        f"reference passes {report.reference_passes}",
        f"utilisation draft {usage.draft_utilisation:.0%} target {usage.target_utilisation:.0%}",
        f"KV {report.kv_usage:.0%}, {report.provisional_pages} pages for draft tokens",
    ]
    if (cost := usage.cost_per_million()) is not None:
        paid = usage.cost_per_million(reserved=True)
        parts.append(f"{cost:.2f} per million tokens busy, {paid:.2f} reserved")
    return "; ".join(parts)


def _reason(pair: PairReport) -> str:
    """Return why a drafter has its state, with the bounds of its gain."""
    gains = {"expected": pair.predicted, "measured": pair.measured}
    bounds = [f"{name} {gain.low:.2f} to {gain.high:.2f}" for name, gain in gains.items() if gain is not None]
    return "; ".join([*([pair.reason] if pair.reason else []), *bounds]) or "no measurement yet"


def _decisions(report: ControlReport) -> str:
    """Return one line for each of the newest decisions."""
    decisions = [(decision, pair) for pair in report.pairs for decision in pair.decisions]
    newest = sorted(decisions, key=lambda entry: entry[0].ago_seconds)[:SHOWN_DECISIONS]
    return "\n".join(
        f"{one.ago_seconds:.0f} s ago {pair.drafter} for {pair.cohort}: {one.what} ({one.reason})"
        for one, pair in newest
    )


def top(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the tables once and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch speculative decoding on a server, by drafter and cohort. A legend below the table explains its columns."""
    from rich.live import Live

    report, learning = fetch_report(url, api_key), _fetch_learning(url, api_key)
    if as_json:
        learned = {} if learning is None else {"learning": asdict(learning)}
        print_json(reading.as_json(report) | learned)
        return
    if once or not stdout.is_terminal:
        stdout.print(report_view(report, learning))
        return
    try:
        with Live(report_view(report, learning), console=stdout, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                view = report_view(fetch_report(url, api_key), _fetch_learning(url, api_key))
                live.update(view, refresh=True)
    except KeyboardInterrupt:
        return


def advise(url: UrlOption = DEFAULT_URL, api_key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Name what limits the speed-up on a server, with figures, and what to change.

    An entry names the problem, the drafter and cohort, and the figures; the indented line says what to change.
    """
    report = fetch_report(url, api_key)
    entries = advice(report)
    for entry in entries:
        where = f"{entry.drafter} for {entry.cohort}: " if entry.drafter else ""
        say(f"{entry.mode}: {where}{entry.what}", f"    {entry.change}")
    if not entries:
        say(without_advice(report))
    if as_json:
        print_json({"advice": fields_of(entries)})
