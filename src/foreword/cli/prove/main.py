"""`foreword prove`: verify exactness."""

from dataclasses import asdict
from math import isfinite
from time import perf_counter
from typing import Annotated

import typer
from rich.table import Table

from foreword.cli.console import JsonOption, print_json, stage_bar, stdout
from foreword.cli.options.common import json_object, one_of
from foreword.errors import RequestError

LARGEST_SEED = 2**62
"""The seeds that are counted on from it must be 64-bit integers, as OpenAI's are."""


def prove(
    full: Annotated[
        bool, typer.Option("--full", help="Run all checks; takes minutes instead of seconds.")
    ] = False,
    small: Annotated[bool, typer.Option("--small", help="With --url: send fewer requests.")] = False,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Test this server over HTTP, such as http://host:port/v1."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --url: name of the model. Default: the server's first.")
    ] = None,
    route: Annotated[
        str,
        typer.Option(
            callback=lambda name: one_of("--route", name, ("completions", "chat")),
            help="With --url: route, completions or chat.",
        ),
    ] = "completions",
    plain_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Server with the same model and without speculation, to compare with."
        ),
    ] = None,
    plain_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="""Request fields that turn speculation off: '{"speculation": false}' (default for Foreword),
            '{"speculative.n_max": 0}' for llama.cpp.""",
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="FOREWORD_API_KEY", help="API key of the server.")
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0, help="Largest difference of two log probabilities, in nats, that counts as rounding."
        ),
    ] = 0.05,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="With --url: first seed of the requests.")
    ] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLAIM", help="With --url: check this claim and those it depends on; repeatable."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --url: print the number of requests and exit.")
    ] = False,
    pair: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="TARGET DRAFT",
            help="Measure how far a draft model is from its target, and the speed-up to expect.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that every acceptance rule preserves the target's distribution, on this machine, with this build.

    By enumeration in small cases, by statistical tests of stated power in others.

    With --url, test any server with OpenAI's API instead: seeds, streams, stops, counts, log probabilities
    and the distribution of its draws. Exit code 1 if a claim is refuted or requests fail under concurrency.

    With --pair, measure how far the distributions of a draft model are from its target's, by category and temperature,
    acceptance under each rule, and the speed-up to expect on this machine.
    """
    if url is not None and pair is not None:
        raise RequestError("--url and --pair exclude each other; give one")
    asks_a_server = {"--dry-run": dry_run, "--small": small, "--only": only, "--model": model} | {
        "--plain-url": plain_url,
        "--plain-body": plain_body,
    }
    if url is None and (without := [option for option, value in asks_a_server.items() if value]):
        raise RequestError(f"{without[0]} is for the examination of a server; add --url")
    if url is not None:
        from foreword.cli.prove.server import Asked, prove_server
        from foreword.proofs.server.ground import FULL as FULL_PLAN
        from foreword.proofs.server.ground import SMALL, STANDARD

        if not isfinite(tolerance):  # with it nothing could be refuted
            raise RequestError(f"--tolerance must be a finite number of nats, not {tolerance}")
        if full and small:
            raise RequestError("--full and --small exclude each other; give one")
        plan = FULL_PLAN if full else SMALL if small else STANDARD
        plain = (
            None if plain_body is None else json_object("--plain-body", plain_body, '{"speculation": false}')
        )
        asked = Asked(url, model, route, plain_url, plain, api_key, tolerance, seed, tuple(only or ()))
        prove_server(asked, plan, dry_run=dry_run, as_json=as_json)
        return
    if pair is not None:
        from foreword.cli.prove.pair import prove_pair

        prove_pair(*pair, full=full, as_json=as_json)
        return
    prove_rules(full=full, as_json=as_json)


def prove_rules(*, full: bool, as_json: bool) -> None:
    """The acceptance rules of this build."""
    from foreword.proofs.suite import FULL, QUICK, run_suites

    size = FULL if full else QUICK
    began = perf_counter()
    with stage_bar(is_long=full) as progress:
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
