"""`foreword prove`: show that the promise holds."""

from dataclasses import asdict
from time import perf_counter
from typing import Annotated

import typer
from rich.table import Table

from foreword.cli.console import JsonOption, print_json, stage_bar, stdout


def prove(
    full: Annotated[bool, typer.Option("--full", help="Everything, in minutes instead of seconds.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove that every acceptance rule keeps the target's distribution, on this machine, with this build.

    By enumeration where the world is small enough, by statistics of a stated power where it isn't.
    """
    from foreword.proofs.suite import FULL, QUICK, run_suites

    size = FULL if full else QUICK
    began = perf_counter()
    with stage_bar() as progress:
        rows = list(run_suites(size, progress))
    table = Table("rule", "case", "tried", "worst deviation", "limit", "power", "", title="exactness")
    for row in rows:
        power = "" if row.power is None else f"{row.power:.1%}"
        verdict = "[green]holds[/green]" if row.passed else "[red]FAILS[/red]"
        table.add_row(
            row.rule, row.case, f"{row.tried:,}", f"{row.deviation:.3g}", f"{row.limit:.3g}", power, verdict
        )
    stdout.print(table)
    passed = all(row.passed for row in rows)
    seconds = perf_counter() - began
    stdout.print(f"{sum(row.passed for row in rows)} of {len(rows)} hold, in {seconds:.0f} s")
    if as_json:
        rows_json = [asdict(row) for row in rows]
        print_json({"size": size.name, "passed": passed, "seconds": seconds, "rows": rows_json})
    if not passed:
        raise typer.Exit(1)
