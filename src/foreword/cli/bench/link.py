"""`foreword bench link`: latency and break-even distance of a draft node."""

from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.cli.console import (
    DEFAULT_MODEL,
    JsonOption,
    ModelOption,
    parse_sizes,
    print_json,
    stage_bar,
    stdout,
)
from foreword.cli.options.cluster import TlsOption, TokenFileOption, tls_files
from foreword.errors import RequestError


def link(
    model: ModelOption = DEFAULT_MODEL,
    drafters: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Draft node to measure. Default: start one on this machine."),
    ] = None,
    method: Annotated[str, typer.Option(help="Drafter of the node that is started here.")] = "draft_model",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,16",
    passes: Annotated[int, typer.Option(min=10, help="Passes of each batch size.")] = 200,
    pass_ms: Annotated[float, typer.Option(min=0.1, help="Milliseconds of a target pass.")] = 15.0,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Acceptance rate per draft token.")] = 0.8,
    levels: Annotated[int, typer.Option(min=1, max=64, help="Levels of a draft.")] = 5,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Connect to a node on another machine without token and TLS.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure round trip and level time of a draft node, host time per pass, and the break-even distance.

    The target is simulated: it sends draft requests --pass-ms apart. --model gives the tokenizer.
    """
    from foreword.cluster.settings import RemoteConfig, need_frames

    need_frames()
    from foreword.bench.draft_nodes import local_node, measure_link
    from foreword.cluster.address import NodeAddress
    from foreword.cluster.framing import ChannelError
    from foreword.cluster.handshake import PeerIdentity, TokenIds
    from foreword.cluster.security import Security, TlsFiles
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.sources.resolve import resolve_model

    sizes, files = parse_sizes("--batch", batch), tls_files(tls)
    if min(sizes) < 1:
        raise RequestError(f"--batch must be at least 1, not {min(sizes)}")
    security = Security.of(str(token_file or ""), None if files is None else TlsFiles(*files))
    given = None if drafters is None else NodeAddress.parse(drafters)
    if given is not None:
        security.check(given, insecure)
    with stage_bar() as on_stage:
        path = resolve_model(model, on_progress=on_stage)
    tokenizer = open_checkpoint(path).tokenizer()
    ids = TokenIds(
        tokenizer.vocab_size, lambda token: tokenizer.token_bytes(token, skip_special_tokens=False)
    )
    identity = PeerIdentity(security, ids)
    protection = [
        *(["--token-file", str(token_file)] if token_file else []),
        *(["--tls", tls] if tls else []),
    ]
    own = local_node(str(path), method, options=protection) if given is None else nullcontext(given)
    with own as address:
        config = RemoteConfig(str(address), shadow=0)
        try:
            report = measure_link(address, identity, config, sizes, passes, pass_ms / 1e3)
        except (OSError, ChannelError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RequestError(f"draft node {address}: {reason}") from error
    farthest = report.break_even_ms(acceptance, levels, pass_ms)
    if as_json:
        print_json(asdict(report) | {"break_even_ms": farthest})
    table = Table(box=SIMPLE_HEAD)
    for column in (
        "batch",
        "engine ms/pass",
        "waited ms/pass",
        "levels arrived",
        "first level ms",
        "next level ms",
    ):
        table.add_column(column, justify="right")
    for cost in report.costs:
        numbers = (cost.engine_ms, cost.waited_ms, cost.levels, cost.first_ms, cost.level_ms)
        table.add_row(str(cost.batch), *("-" if number is None else f"{number:.3f}" for number in numbers))
    stdout.print(table)
    stdout.print(
        f"round trip {report.round_trip_ms:.3f} ms, p99 {report.round_trip_p99_ms:.3f} ms", soft_wrap=True
    )
    if farthest is None:
        stdout.print(
            f"no level of this node arrived before a pass of {pass_ms:g} ms started: there is no break-even distance; "
            "try longer passes (--pass-ms) or a faster drafter",
            soft_wrap=True,
        )
        return
    stdout.print(
        f"break-even distance {max(farthest, 0):.1f} ms: {levels} levels at acceptance {acceptance:g}, "
        f"passes of {pass_ms:g} ms, one request",
        soft_wrap=True,
    )
