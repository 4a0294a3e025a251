"""`foreword prove`: verify exactness."""

from dataclasses import dataclass
from math import isfinite
from time import perf_counter

import typer
from rich.table import Table

from foreword.cli.console import fields_of, stage_bar, stdout
from foreword.cli.options.common import JsonCommand, json_object, one_of
from foreword.cli.options.grouped import command, flag, given, option
from foreword.errors import RequestError

# Options that need --url, but the key, which may be in the environment.
_OF_SERVERS = (
    *("small", "brief", "minutes", "model", "route", "plain_url", "plain_body"),
    *("tolerance", "seed", "only", "dry_run"),
)
LARGEST_SEED = 2**62  # largest first seed, so that all seeds are 64-bit integers


@dataclass(frozen=True, kw_only=True)
class Prove(JsonCommand):
    """Prove that every acceptance rule preserves the target's distribution, on this machine, with this build.

    By enumeration in small cases, by statistical tests of stated power in others.

    With --url, test any server with OpenAI's API instead: seeds, streams, stops, counts, log probabilities
    and the distribution of its draws. Exit code 1 if a claim is refuted or requests fail under concurrency.

    With --pair, measure how far the distributions of a draft model are from its target's, by category and temperature,
    acceptance under each rule, and the speed-up to expect on this machine.
    """

    full: bool = flag("Run all checks; takes minutes instead of seconds.")
    small: bool = flag("With --url: send fewer requests.")
    brief: bool = flag("With --url: send the fewest requests, with short answers; for slow servers.")
    minutes: float | None = option(None, "With --url: end after this time; skip the other claims.", min=0.0)
    url: str | None = option(None, "Test this server over HTTP, such as http://host:port/v1.", metavar="URL")
    model: str | None = option(None, "With --url: name of the model. Default: the server's first.")
    route: str = option(
        "completions",
        "With --url: route, completions or chat.",
        callback=lambda name: one_of("--route", name, ("completions", "chat")),
    )
    plain_url: str | None = option(
        None, "With --url: server with the same model without speculation.", metavar="URL"
    )
    plain_body: str | None = option(
        None,
        """Request fields that turn speculation off: '{"speculation": false}' (default for Foreword),
            '{"speculative.n_max": 0}' for llama.cpp.""",
        metavar="JSON",
    )
    api_key: str | None = option(None, "With --url: API key of the server.", envvar="FOREWORD_API_KEY")
    tolerance: float = option(
        0.05, "With --url: largest log-probability difference, in nats, from rounding.", min=0.0
    )
    seed: int = option(0, "With --url: first seed of the requests.", min=0, max=LARGEST_SEED)
    only: list[str] | None = option(None, "With --url: check this claim; repeatable.", metavar="CLAIM")
    dry_run: bool = flag("With --url: print the number of requests and exit.")
    pair: tuple[str, str] | None = option(
        None, "Compare a draft model with its target.", metavar="TARGET DRAFT"
    )

    def run(self) -> None:
        if self.url is not None and self.pair is not None:
            raise RequestError("--url and --pair exclude each other; give one")
        if self.url is not None:
            self._examine()
            return
        if needing_url := given(self, *_OF_SERVERS):
            raise RequestError(f"{needing_url[0]} is for the examination of a server; add --url")
        if self.pair is not None:
            from foreword.cli.prove.pair import prove_pair

            self.show_json(prove_pair(*self.pair, self.full))
        else:
            self._rules()

    def _examine(self) -> None:
        from foreword.cli.prove.server import prove_server
        from foreword.proofs.server.context import BRIEF, FULL, SMALL, STANDARD

        if not isfinite(self.tolerance):  # an infinite tolerance would refute nothing
            raise RequestError(f"--tolerance must be a finite number of nats, not {self.tolerance}")
        sizes = {"--full": FULL, "--small": SMALL, "--brief": BRIEF}
        chosen = given(self, "full", "small", "brief")
        if len(chosen) > 1:
            raise RequestError(f"{' and '.join(chosen)} exclude each other; give one")
        plan = sizes[chosen[0]] if chosen else STANDARD
        plain = None
        if self.plain_body is not None:
            plain = json_object("--plain-body", self.plain_body, '{"speculation": false}')
        prove_server(self, plan, plain)

    def _rules(self) -> None:
        from foreword.proofs.suite import FULL, QUICK, run_suites

        size = FULL if self.full else QUICK
        began = perf_counter()
        with stage_bar(is_long=self.full) as progress:
            rows = list(run_suites(size, progress))
        table = Table("rule", "case", "tried", "worst deviation", "limit", "power", "", title="exactness")
        for row in rows:
            power = "" if row.power is None else f"{row.power:.1%}"
            verdict = "[green]holds[/green]" if row.passed else "[red]FAILS[/red]"
            figures = f"{row.tried:,}", f"{row.deviation:.3g}", f"{row.limit:.3g}"
            table.add_row(row.rule, row.case, *figures, power, verdict)
        stdout.print(table)
        passed, seconds = all(row.passed for row in rows), perf_counter() - began
        stdout.print(f"{sum(row.passed for row in rows)} of {len(rows)} hold, in {seconds:.0f} s")
        self.show_json({"size": size.name, "passed": passed, "seconds": seconds, "rows": fields_of(rows)})
        if not passed:
            raise typer.Exit(1)


prove = command(Prove)
