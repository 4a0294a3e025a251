"""`foreword prove`: show that the promise holds."""

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
    full: Annotated[bool, typer.Option("--full", help="Everything, in minutes instead of seconds.")] = False,
    small: Annotated[bool, typer.Option("--small", help="With --url: fewer requests.")] = False,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Examine this server from outside, http://host:port/v1.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --url: the server's model; its first if not given.")
    ] = None,
    route: Annotated[
        str,
        typer.Option(
            callback=lambda name: one_of("--route", name, ("completions", "chat")),
            help="With --url: completions or chat.",
        ),
    ] = "completions",
    plain_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The same model on a server without speculation.")
    ] = None,
    plain_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="""Fields that turn speculation off for a request, such as '{"speculation": false}', which is known of
            our server; '{"speculative.n_max": 0}' for llama.cpp's.""",
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="FOREWORD_API_KEY", help="Key of the server.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Nats between two log probabilities that rounding may explain.")
    ] = 0.05,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="With --url: first of the seeds that are sent.")
    ] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM", help="With --url: this claim and what it rests on; repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --url: only tell the cost in requests.")
    ] = False,
    pair: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="TARGET DRAFT", help="How far a draft model is from its target, and what that is worth."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that every acceptance rule keeps the target's distribution, on this machine, with this build.

    By enumeration where the world is small enough, by statistics of a stated power where it isn't.

    With --url, examine any server that speaks OpenAI's HTTP instead: seeds, streams, stops, counts, log probabilities
    and the distribution of its draws. Exit code 1 if a claim is refuted or requests fail under concurrency.

    With --pair, how far the laws of a draft model are from its target's, by kind of text and temperature, what each
    rule accepts of its guesses, and the speed-up to expect on this machine.
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
        from foreword.proofs.server.plan import FULL as FULL_PLAN
        from foreword.proofs.server.plan import SMALL, STANDARD

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
