"""`foreword top` and `foreword advise`."""

import time
from dataclasses import asdict
from typing import Annotated

import typer

from foreword.cli.console import JsonOption, print_json, stdout
from foreword.cli.watch.asking import DEFAULT_URL, KeyOption, UrlOption, ask_report


def top(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the tables once and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch speculative decoding on a server, by drafter and cohort. A legend below the table explains its columns."""
    from rich.live import Live

    from foreword.cli.watch.tables import report_view
    from foreword.control.reporting.reading import as_json as written

    report = ask_report(url, api_key)
    if as_json:
        print_json(written(report))
        return
    if once or not stdout.is_terminal:
        stdout.print(report_view(report))
        return
    try:
        with Live(report_view(report), console=stdout, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(report_view(ask_report(url, api_key)), refresh=True)
    except KeyboardInterrupt:
        return


def advise(url: UrlOption = DEFAULT_URL, api_key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Name what limits the speed-up on a server, with figures, and what to change.

    An entry names the problem, the drafter and cohort, and the figures; the indented line says what to change.
    """
    from foreword.control.reporting.advising import advise as advice
    from foreword.control.reporting.advising import without_advice

    report = ask_report(url, api_key)
    found = advice(report)
    for one in found:
        where = f"{one.drafter} for {one.cohort}: " if one.drafter else ""
        stdout.print(f"{one.mode}: {where}{one.what}", soft_wrap=True)
        stdout.print(f"    {one.change}", soft_wrap=True)
    if not found:
        stdout.print(without_advice(report), soft_wrap=True)
    if as_json:
        print_json({"advice": [asdict(one) for one in found]})
