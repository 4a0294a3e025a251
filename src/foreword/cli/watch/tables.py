"""A report as tables for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from foreword.control.reporting.figures import Bounds, ControlReport, PairReport

SHOWN_DECISIONS = 8


def report_view(report: ControlReport) -> RenderableType:
    """Everything, the pairs first."""
    return Group(_title(report), _pairs(report), _engine(report), _decisions(report))


def _title(report: ControlReport) -> str:
    switch = "on" if report.enabled else "switched off for everybody"
    file = f", policy {report.policy_file}" if report.policy_file else ""
    return f"speculation {switch}{file}: batch {report.batch:.0f}, plain step {report.step_ms:.2f} ms"


def _pairs(report: ControlReport) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("drafter", "cohort", "state", "expected", "measured", "depth", "accepted by level"):
        table.add_column(name)
    for name in ("break-even", "coverage", "ms/ask", "run p50/p90", "asks"):
        table.add_column(name, justify="right")
    for pair in report.pairs:
        table.add_row(*_cells(pair))
    if not report.pairs:
        table.add_row("nobody was asked yet")
    return table


def _cells(pair: PairReport) -> list[str]:
    state = pair.state if pair.state != "canary" else f"canary {pair.percent:g}%"
    use = "" if pair.in_use or pair.state in ("off", "held") else " (idle)"
    return [
        pair.drafter,
        pair.cohort,
        f"{state}{use}: {pair.reason}" if pair.reason else f"{state}{use}",
        _ratio(pair.predicted),
        _ratio(pair.measured),
        f"{pair.kept}/{pair.depth}" if pair.depth else "-",
        " ".join(f"{rate:.2f}" for rate in pair.acceptance_by_level[:5]) or "-",
        "-" if pair.break_even is None else f"{pair.break_even:.2f}",
        "-" if pair.coverage is None else f"{pair.coverage:.0%}",
        f"{pair.draft_ms:.2f}",
        f"{pair.run_p50:g}/{pair.run_p90:g}",
        str(pair.asks),
    ]


def _ratio(bounds: Bounds | None) -> str:
    return "-" if bounds is None else f"{bounds.mean:.2f}× [{bounds.low:.2f}, {bounds.high:.2f}]"


def _engine(report: ControlReport) -> str:
    usage = report.usage
    parts = [
        f"probes {report.probe_share:.2%} of the time",
        f"reference passes {report.reference_passes}",
        f"utilisation draft {usage.draft_utilisation:.0%} target {usage.target_utilisation:.0%}",
        f"KV {report.kv_usage:.0%}, {report.provisional_pages} pages for guesses",
    ]
    if (cost := usage.cost_per_million()) is not None:
        paid = usage.cost_per_million(reserved=True)
        parts.append(f"{cost:.2f} per million tokens busy, {paid:.2f} reserved")
    return "; ".join(parts)


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
