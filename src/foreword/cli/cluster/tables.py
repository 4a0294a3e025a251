"""How a cluster stands, in tables that fit 80 columns."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.cli.console import stdout

if TYPE_CHECKING:
    from foreword.cluster.pools.autoscaling import NodeStatus, TargetStatus
    from foreword.cluster.pools.fleet import MemberTold

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
    "homes": "homes",
    "waits": "waits",
    "1st ms": "first_ms",
    "lvl ms": "level_ms",
    "accept": "acceptance",
}


def show_status(
    members: Sequence["MemberTold"], targets: Sequence["TargetStatus"], nodes: Sequence["NodeStatus"]
) -> None:
    """Tables, and below them why something is not as it should be."""
    if members:
        _show(_MEMBER, members)
    if targets:
        _show(_TARGET, targets)
    if nodes:
        _show(_NODE, nodes)
    reasons = [(one.name, "it cannot use what it was given") for one in members if one.is_refused]
    reasons += [(one.name, one.reason) for one in targets]
    reasons += [(f"{one.node} for {one.target}", one.reason) for one in nodes]
    for name, reason in reasons:
        if reason:
            stdout.print(f"{name}: {reason}", soft_wrap=True, markup=False, highlight=False)


def _show(columns: Mapping[str, str], rows: Sequence[object]) -> None:
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
