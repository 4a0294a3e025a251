"""A report as tables for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from foreword.control.reporting.figures import ControlReport, PairReport

SHOWN_DECISIONS = 8

COLUMNS = {
    "gain": "speed relative to plain decoding; with ?: expected, not yet measured",
    "depth": "levels of a draft worth verifying / levels drafted",
    "accepted": "acceptance rate of the first two levels",
    "break-even": "acceptance rate from which drafting is faster at this batch",
    "coverage": "share of draft requests that got a draft",
    "draft ms": "time per draft request",
    "run": "draft tokens accepted per pass, median / 90th percentile",
}
"""Columns of figures, and what they mean."""


def report_view(report: ControlReport) -> RenderableType:
    """Return all tables and lines, the pairs of drafter and cohort first."""
    shown = (
        [_pairs(report), _legend(), _reasons(report)]
        if report.pairs
        else ["no drafter has received a draft request yet"]
    )
    return Group(_title(report), *shown, _engine(report), _decisions(report))


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
    usage = report.usage
    parts = [
        f"probes {report.probe_share:.2%} of the time",
        f"reference passes {report.reference_passes}",
        f"utilisation draft {usage.draft_utilisation:.0%} target {usage.target_utilisation:.0%}",
        f"KV {report.kv_usage:.0%}, {report.provisional_pages} pages for draft tokens",
    ]
    if (cost := usage.cost_per_million()) is not None:
        paid = usage.cost_per_million(reserved=True)
        parts.append(f"{cost:.2f} per million tokens busy, {paid:.2f} reserved")
    return "; ".join(parts)


def _reasons(report: ControlReport) -> str:
    """Why each pair is where it is, and between what its gain lies."""
    return "\n".join(f"{pair.drafter} for {pair.cohort}: {_reason(pair)}" for pair in report.pairs)


def _reason(pair: PairReport) -> str:
    known = {"expected": pair.predicted, "measured": pair.measured}
    told = [f"{name} {b.low:.2f} to {b.high:.2f}" for name, b in known.items() if b is not None]
    return "; ".join([*([pair.reason] if pair.reason else []), *told]) or "no measurement yet"


def _decisions(report: ControlReport) -> str:
    told = sorted(
        (
            one.ago_seconds,
            f"{one.ago_seconds:.0f} s ago {pair.drafter} for {pair.cohort}: {one.what} ({one.reason})",
        )
        for pair in report.pairs
        for one in pair.decisions
    )
    return "\n".join(text for _, text in told[:SHOWN_DECISIONS])
