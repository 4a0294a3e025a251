"""`foreword cluster`: targets and draft nodes from one file."""

import logging
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.cluster_tables import show_status
from foreword.cli.console import JsonOption, print_json

app = typer.Typer(no_args_is_help=True, help="Targets and draft nodes from one file (docs/cluster.md).")

FileArgument = Annotated[
    Path, typer.Argument(metavar="CLUSTER.yaml", help="Which targets and nodes there are.")
]


@app.command()
def up(file: FileArgument) -> None:
    """Start all members on this machine and keep them running, until Ctrl-C or SIGTERM."""
    from foreword.cluster.pools.file import read_cluster
    from foreword.cluster.pools.running import Pools

    pools = Pools(read_cluster(file))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: pools.stopped.set())
    pools.run()


@app.command()
def status(
    file: FileArgument,
    api_key: Annotated[str | None, typer.Option(help="Of the targets. Default: FOREWORD_API_KEY.")] = None,
    as_json: JsonOption = False,
) -> None:
    """What the targets say of themselves and of their nodes; exit code 1 if any of them is not ready."""
    from foreword.cluster.pools.file import read_cluster
    from foreword.cluster.pools.status import cluster_status, fetch_json

    key = api_key or os.environ.get("FOREWORD_API_KEY", "").split(",")[0]
    targets, nodes = cluster_status(read_cluster(file), fetch_json(key))
    if as_json:
        print_json({"targets": [asdict(one) for one in targets], "nodes": [asdict(one) for one in nodes]})
    show_status(targets, nodes)
    if not all(one.is_ok for one in targets):
        raise typer.Exit(1)
