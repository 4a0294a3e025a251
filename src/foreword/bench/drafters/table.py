"""The rows as a table for people."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.bench.drafters.methods import is_random
from foreword.bench.drafters.summary import ALL, Row

_FIGURES = ("n", "α", "τ", "speed-up", "draft", "verify", "accept", "rest", "memory", "differ")


def drafter_table(rows: Sequence[Row], title: str) -> Table:
    """Drafter by drafter, a line for every category and one for all of them. Fits 80 columns."""
    caption = _CAPTION + (_RANDOM if any(is_random(row.drafter) for row in rows) else "")
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0)
    table.title_justify = table.caption_justify = "left"
    table.add_column("drafter", overflow="fold")
    for name in _FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    shown = ""
    for row in rows:
        if row.drafter != shown:
            table.add_row(f"[bold]{row.drafter}[/bold]")
            shown = row.drafter
        table.add_row(f"  {row.category}", *_cells(row), end_section=row.category == ALL)
    return table


_CAPTION = (
    "n: prompts. α: guesses accepted, of those judged. τ: tokens per target pass. Speed-up: tokens per second "
    "over all prompts of the line, relative to plain decoding of the same prompts in this run. Draft, verify, "
    "accept, rest: milliseconds per step. All without the prompt's own passes. Memory: what the drafter adds. "
    "Differ: texts that are not those of plain decoding."
)

_RANDOM = (
    " Model=random: random weights. Such a head costs what a trained one costs and guesses nothing right, so that α, "
    "τ and speed-up would say nothing; they are left out."
)


def _cells(row: Row) -> list[str]:
    colour = "green" if row.speedup >= 1 else "yellow"
    different = f"[red]{row.different_texts}[/red]" if row.different_texts else "0"
    judged = [
        "-" if row.alpha is None else f"{row.alpha:.2f}",
        f"{row.tau:.2f}",
        f"[{colour}]{row.speedup:.2f}×[/{colour}]",
    ]
    return [
        str(row.prompts),
        *(["-"] * len(judged) if is_random(row.drafter) else judged),
        f"{row.draft_ms:.2f}",
        f"{row.verify_ms:.1f}",
        f"{row.accept_ms:.2f}",
        f"{row.rest_ms:.2f}",
        _megabytes(row.memory_bytes),
        different,
    ]


def _megabytes(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / 1e6:.1f} MB" if size < 10e6 else f"{size / 1e6:.0f} MB"
