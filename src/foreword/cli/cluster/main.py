"""`foreword cluster`, `foreword draft-node` and `foreword router`: the processes of several machines."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.cli.console import fields_of, log_to_stderr, print_json, say, stage_bar, stderr, stdout
from foreword.cli.options.common import JsonOption, json_object
from foreword.cli.options.grouped import Command, command, flag, late, option, options_command
from foreword.cli.options.model import DEFAULT_MODEL, DeviceOptions, ModelOption
from foreword.cli.options.nodes import SecurityOptions, labels_option
from foreword.cli.options.serve import ListeningOptions, client_key, need_server_extra, port_option
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.cluster.pools.autoscaling import NodeStatus, TargetStatus
    from foreword.cluster.pools.file import ClusterConfig
    from foreword.cluster.pools.fleet import ClusterState, LocalFleet, MemberStatus
    from foreword.cluster.pools.ray_fleet import RayFleet

# Columns of the tables of `cluster status`: heading -> field.
_MEMBER = {
    "member": "name",
    "kind": "kind",
    "address": "address",
    "machine": "machine",
    "restarts": "restarts",
}
_TARGET = {
    "target": "name",
    "state": "state",
    "running": "running",
    "waiting": "waiting",
    "tok/pass": "tokens_per_pass",
    "$/M tok": "cost_per_million",
}
_NODE = {
    "target": "target",
    "node": "node",
    "state": "state",
    "requests": "homes",
    "waits": "waits",
    "1st ms": "first_ms",
    "lvl ms": "level_ms",
    "accept": "acceptance",
}


def show_status(
    members: Sequence["MemberStatus"], targets: Sequence["TargetStatus"], nodes: Sequence["NodeStatus"]
) -> None:
    """Print a table of each kind of status, and below them why members, targets or nodes have problems."""
    for columns, rows in ((_MEMBER, members), (_TARGET, targets), (_NODE, nodes)):
        if rows:
            _show(columns, rows)
    reasons = [(one.name, "it refused its options") for one in members if one.is_refused]
    reasons += [(one.name, one.reason) for one in targets]
    reasons += [(f"{one.node} for {one.target}", one.reason) for one in nodes]
    for name, reason in reasons:
        if reason:
            stdout.print(f"{name}: {reason}", soft_wrap=True, markup=False)


def _show(columns: Mapping[str, str], rows: Sequence[object]) -> None:
    """Print a table of these fields of the rows; columns of texts are left-aligned."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for title, key in columns.items():
        is_name = isinstance(getattr(rows[0], key), str)
        table.add_column(title, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(getattr(row, key)) for key in columns.values()))
    stdout.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


app = typer.Typer(no_args_is_help=True, help="Run targets and draft nodes from one file (docs/cluster.md).")

FileArgument = Annotated[Path, typer.Argument(metavar="CLUSTER.yaml", help="Targets and draft nodes.")]
KeyOption = Annotated[str | None, typer.Option(help="API key of the targets. Default: FOREWORD_API_KEY.")]

DRAIN_SECONDS = 120.0  # seconds that `down` waits for members to drain


@app.command()
def up(file: FileArgument, api_key: KeyOption = None) -> None:
    """Start all members and keep them running, until `cluster down`, Ctrl-C or SIGTERM.

    A member with invalid options prints the reason and is not restarted.
    """
    from foreword.cluster.pools.autoscaling import Autoscaler, fetch_json
    from foreword.cluster.pools.file import read_cluster
    from foreword.cluster.pools.fleet import ClusterState

    cluster, state = read_cluster(file), ClusterState(file)
    if (pid := state.watcher()) is not None:
        raise RequestError(f"this cluster is up already; process {pid} supervises it")
    log_to_stderr()
    fleet = _fleet(cluster, state)
    scaler = None
    if cluster.scale is not None:
        node = cluster.member(cluster.scale.node)
        scaler = Autoscaler(cluster.scale, node, fleet, fetch_json(client_key(api_key)))

    members: Sequence[MemberStatus] = ()

    def check() -> None:
        nonlocal members
        members = fleet.members()
        state.write(members)
        if members and all(one.is_refused for one in members):
            fleet.stopped.set()
        if scaler is not None:
            scaler.rescale()

    fleet.stopped.listen()
    try:
        fleet.run(check)
    finally:
        state.forget()
    if members and all(one.is_refused for one in members):
        raise RequestError("all members of this cluster refused their options; see above")


@app.command()
def down(file: FileArgument) -> None:
    """Stop all members: targets finish their answers first, nodes notify their targets."""
    from foreword.cluster.pools.file import read_cluster
    from foreword.cluster.pools.fleet import ClusterState

    cluster, state = read_cluster(file), ClusterState(file)
    if state.stop():
        until = time.monotonic() + DRAIN_SECONDS
        while state.watcher() is not None:
            if time.monotonic() > until:
                raise RequestError(f"the cluster has not ended after {DRAIN_SECONDS:g} s")
            time.sleep(0.1)
    elif cluster.ray is not None and cluster.ray.address:
        from foreword.cluster.pools.ray_fleet import RayFleet

        fleet = RayFleet(cluster)  # its supervisor is gone, but its actors remain
        fleet.find()
        fleet.down()
    else:
        raise RequestError("this cluster is not up on this machine")
    stdout.print("the cluster is down")


@app.command()
def status(file: FileArgument, api_key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Show the state of targets and of their draft nodes; exit code 1 if a target is not ready."""
    from foreword.cluster.pools.autoscaling import cluster_status, fetch_json
    from foreword.cluster.pools.file import read_cluster
    from foreword.cluster.pools.fleet import ClusterState

    cluster, members = read_cluster(file), ClusterState(file).members()
    placed = {one.name: one.address for one in members}
    urls = {one.name: placed.get(one.name, one.address) for one in cluster.members if one.is_target}
    targets, nodes = cluster_status(urls, fetch_json(client_key(api_key)))
    if as_json:
        print_json({"members": fields_of(members), "targets": fields_of(targets), "nodes": fields_of(nodes)})
    show_status(members, targets, nodes)
    if not all(one.is_ok for one in targets):
        raise typer.Exit(1)


def _fleet(cluster: "ClusterConfig", state: "ClusterState") -> "LocalFleet | RayFleet":
    """Return the processes of this machine, or the started actors of a Ray cluster."""
    if cluster.ray is None:
        from foreword.cluster.pools.fleet import LocalFleet

        return LocalFleet(cluster, state.folder)
    from foreword.cluster.pools.ray_fleet import RayFleet

    fleet = RayFleet(cluster)
    fleet.up()
    return fleet


@dataclass(frozen=True, kw_only=True)
class DraftNode(SecurityOptions, DeviceOptions, Command):
    """Serve drafts to targets, which use `foreword serve --drafters HOST:PORT`. A node cannot change a text.

    Example: foreword draft-node --model smollm2-135m --listen 127.0.0.1:8400
    """

    model: ModelOption = late(DEFAULT_MODEL, -1)
    method: str = option("draft_model", "Drafter: draft_model (--model itself), layer_skip, suffix+ngram.")
    options: str | None = option(None, 'Settings of the drafter, such as {"tree_width": 3}.', metavar="JSON")
    listen: str = option("127.0.0.1:8400", "Address to listen on, or unix:/PATH.", metavar="HOST:PORT")
    capacity: int = option(256, "Most concurrent requests of all targets.", min=1)
    kv_tokens: int = option(32_768, "Size of a draft model's KV cache in tokens, over all requests.", min=16)
    run_ahead: bool = option(True, "Draft on while a target verifies; no gain for fast, near nodes.")
    labels: str = labels_option()
    insecure: bool = flag("Listen beyond this machine without token and TLS.")
    drain_seconds: float = option(10.0, "Seconds that SIGTERM waits until targets use other nodes.", min=0)

    def run(self) -> None:
        from foreword.cluster.settings import need_frames, parse_labels

        need_frames()
        from foreword.cluster.address import NodeAddress
        from foreword.cluster.pools.running import Stopping
        from foreword.drafters.config import SpeculationConfig
        from foreword.drafters.registry import drafter_kinds
        from foreword.engine.loader import load_model
        from foreword.wire.draft_node import NodeSettings, check_methods, make_node

        address, security = NodeAddress.parse(self.listen), self.security()
        security.check(address, self.insecure)
        names, kinds = self.method.split("+"), drafter_kinds()
        check_methods(names)  # before loading a model
        keys: dict[str, Any] = {"method": names}
        keys |= {} if self.options is None else json_object("--options", self.options)
        if any(name in kinds and kinds[name].build_on_node is not None for name in names):
            keys["model"] = self.model
        config = SpeculationConfig.parse(json.dumps(keys))
        labels = parse_labels(self.labels)
        settings = NodeSettings(address, security, self.capacity, self.kv_tokens, self.run_ahead, labels)
        log_to_stderr()
        stderr.print(f"[dim]loading {self.model} ...[/dim]")
        with stage_bar() as on_stage:
            loaded = load_model(self.model, **self.load_options, progress=partial(on_stage, "loading"))
        node = make_node(loaded, config, settings)
        stopping = Stopping().listen()
        node.start()
        say(f"{self.method} of {self.model} drafts on {node.address}")
        stopping.wait()
        node.drain(self.drain_seconds)
        node.close()


draft_node = command(DraftNode)


@dataclass(frozen=True, kw_only=True)
class RouterListening(ListeningOptions):
    """The router's address."""

    port: int = port_option(8080)


@options_command
def router(
    *,
    targets: Annotated[str, typer.Option(metavar="HOST:PORT,...", help="Targets, or @FILE of them.")],
    listening: RouterListening,
    max_requests: Annotated[int, typer.Option(min=1, help="Most requests in flight; more get 429.")] = 1024,
) -> None:
    """Route requests to the target that knows the longest prefix, or has the least load, and stream the answers.

    Example: foreword router --targets 127.0.0.1:8000,127.0.0.1:8001 --port 8080
    """
    address = listening.address()
    need_server_extra()
    from foreword.server.router.app import RouterRun
    from foreword.server.router.targets import Targets
    from foreword.server.settings import Limits, ServerSettings

    settings = ServerSettings(
        model_name="",  # each target has its own
        limits=Limits(running=max_requests, queued=0, connections=2 * max_requests),
        **listening.settings(),
    )
    known_targets = Targets(targets)
    log_to_stderr()
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every health check
    with address.bind() as port:

        def show_ready(url: str) -> None:
            ready = sum(target.is_ready for target in known_targets)
            say(f"routing on {url} to {len(list(known_targets))} targets, {ready} of them ready")

        asyncio.run(RouterRun(settings, known_targets, port).run(show_ready))
