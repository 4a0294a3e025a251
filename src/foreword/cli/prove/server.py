"""`foreword prove --url`: black-box examination of a server."""

import asyncio
import json
from contextlib import AsyncExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from foreword.cli.bench.common import provenance
from foreword.cli.console import say, stage_bar, stdout
from foreword.errors import RequestError
from foreword.proofs.server import examination
from foreword.proofs.server.claims import CHECKS
from foreword.proofs.server.client import Broken, RefusedByServer, Server
from foreword.proofs.server.context import (
    MOST_REQUESTS,
    ClaimVerdict,
    ExaminationPlan,
    ProofContext,
    Reproduction,
)
from foreword.wire.openai_http import base_address, listed_model, open_client

if TYPE_CHECKING:  # imports this module
    from foreword.cli.prove.main import Prove

_COLOURS = {
    "held": "green",
    "not refuted": "green",
    "differs at near-ties": "yellow",
    "not tried": "yellow",
    "refuted": "red",
    "fails under concurrency": "red",
}
_FAILURES = ("refuted", "fails under concurrency")
MOST_SHOWN = 4  # maximum printed requests of a reproduction
_SWITCHES = {"foreword": {"speculation": False}}  # fields that turn speculation off, by the model's owner


def prove_server(options: "Prove", plan: ExaminationPlan, plain_body: dict[str, Any] | None) -> None:
    """Examine the server and print the verdicts; exit with 1 if a claim was refuted or requests failed together."""
    report = asyncio.run(_run(options, plan, plain_body))
    options.show_json(report)
    if report["refuted"] or report["fails_under_concurrency"]:
        raise typer.Exit(1)


async def _run(options: "Prove", plan: ExaminationPlan, plain_body: dict[str, Any] | None) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        server, plain = await _servers(options, plain_body, stack)
        try:
            context = await examination.prepare(server, plan, plain, options.tolerance, options.seed)
        except (Broken, RefusedByServer) as fault:
            raise RequestError(f"{server.address} does not answer a plain request: {fault}") from None
        checks = examination.chosen(options.only) if options.only else CHECKS
        by_check = examination.cost(context, checks)
        most = MOST_REQUESTS + sum(by_check.values())
        _print_cost(context, most)
        examined: list[ClaimVerdict] = []
        began = perf_counter()
        if not options.dry_run:
            limit = None if options.minutes is None else 60 * options.minutes
            try:
                with stage_bar(is_long=True) as progress:
                    async for verdict in examination.examine(context, progress, checks, limit):
                        examined.append(verdict)
            finally:  # also after Ctrl-C, or if the server is gone
                if examined:
                    _print(context, examined)
        requests_made = context.server.requests + (plain.requests if plain else 0)
    verdicts = [examination.as_json(verdict) for verdict in examined]
    refuted, failing = (
        [verdict["check"] for verdict in verdicts if verdict["verdict"] == kind] for kind in _FAILURES
    )
    return {
        "url": server.address,
        "model": server.model,
        "plan": plan.name,
        "minutes": options.minutes,
        "seconds": perf_counter() - began,
        "requests_told": most,
        "requests_by_check": by_check,
        "requests_made": requests_made,
        "refuted": refuted,
        "fails_under_concurrency": failing,
        "verdicts": verdicts,
        "made": provenance(),
    }


async def _servers(
    options: "Prove", plain_body: dict[str, Any] | None, stack: AsyncExitStack
) -> tuple[Server, Server | None]:
    """Return clients of the server, and of the same model without speculation if that is known; closed by `stack`."""
    assert options.url is not None
    client = await stack.enter_async_context(open_client(base_address(options.url), options.api_key))
    model = await listed_model(client, options.model or "")
    server = Server(client, model.name, options.route)
    if options.plain_url is not None:
        other = await stack.enter_async_context(open_client(base_address(options.plain_url), options.api_key))
        name = (await listed_model(other, options.model or "")).name
        return server, Server(other, name, options.route, plain_body or {})
    switch = _SWITCHES.get(model.owner or "") if plain_body is None else plain_body
    return server, None if switch is None else Server(client, model.name, options.route, switch)


def _print_cost(context: ProofContext, most: int) -> None:
    """Print the size of the examination and its largest number of requests."""
    plan = context.plan
    say(
        f"{context.server.model} at {context.server.address}: at most {most:,} requests ({plan.name}: "
        f"{plan.prompts} prompts × {plan.tokens} tokens, {plan.draws:,} draws × {plan.depth} tokens); "
        "a refutation costs a few more"
    )


def _print(context: ProofContext, verdicts: list[ClaimVerdict]) -> None:
    extents = Column("prompts × tokens", no_wrap=True)
    table = Table("claim", "verdict", extents, "detectable", "", title="examination", show_lines=False)
    for verdict in verdicts:
        colour = _COLOURS[verdict.outcome.value]
        words = f"[{colour}]{verdict.words}[/{colour}]"
        table.add_row(verdict.check, words, str(verdict.extent), verdict.visible, Text(verdict.detail))
    stdout.print(table)
    for verdict in verdicts:
        if verdict.reproduction is not None:
            _print_reproduction(context.server.address, verdict.check, verdict.reproduction)
    stdout.print(_summary([verdict.outcome.value for verdict in verdicts]))


def _summary(outcomes: list[str]) -> str:
    """Return the report's last line: failed claims out of those tried."""
    refuted, failing = (outcomes.count(kind) for kind in _FAILURES)
    tried = len(outcomes) - outcomes.count("not tried")
    line = f"{refuted} of {tried} claims refuted" if refuted else f"none of {tried} claims refuted"
    line += f", {failing} failed under concurrency" if failing else ""
    return line + (f"; {len(outcomes) - tried} not tried" if tried < len(outcomes) else "")


def _print_reproduction(address: str, check: str, shown: Reproduction) -> None:
    say(f"\n{check}" + (", all at once:" if shown.at_once else ":"))
    for body in shown.bodies[:MOST_SHOWN]:
        quoted = json.dumps(dict(body), ensure_ascii=False).replace("'", "'\\''")
        say(f"  curl {address} --json '{quoted}'")
    if (more := len(shown.bodies) - MOST_SHOWN) > 0:
        say(f"  and {more} more, which --json lists")
    say(f"  got       {shown.got}", f"  expected  {shown.expected}")
