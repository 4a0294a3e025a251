"""How a cluster stands, as people read it."""

import io

import pytest
from rich.console import Console

from foreword.cli.cluster import main as cluster_tables
from foreword.cluster.pools.autoscaling import NodeStatus, TargetStatus
from foreword.cluster.pools.fleet import MemberStatus


def test_a_status_fits_80_columns_and_says_why(monkeypatch: pytest.MonkeyPatch):
    page = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(cluster_tables, "stdout", page)
    reason = "the connection was lost: nothing was heard of it for 30 seconds, and nobody answers there"
    cluster_tables.show_status(
        [MemberStatus("answers-1", "target", "192.168.100.101:8000", 2, "192.168.100.101")],
        [
            TargetStatus("answers-1", "ok", 12, 3, 2.5, 0.4),
            TargetStatus("answers-2", "down", reason="nobody"),
        ],
        [
            NodeStatus("answers-1", "192.168.100.101:8400", "shadow", "", 12, 1234, 1, 1.234, 0.5, 0.8),
            NodeStatus("answers-1", "192.168.100.102:8400", "down", reason, 0, 0, 1, None, None, None),
        ],
    )
    lines = page.file.getvalue().splitlines()
    tables = [line for line in lines if not line.endswith((reason, "nobody"))]
    assert max(map(len, tables)) <= 80
    (node,) = (line for line in lines if "8400" in line and "shadow" in line)
    assert node.split() == [
        "answers-1",
        "192.168.100.101:8400",
        "shadow",
        "12",
        "1234",
        "1.23",
        "0.50",
        "0.80",
    ]
    assert "answers-2: nobody" in lines
    assert f"192.168.100.102:8400 for answers-1: {reason}" in lines
