"""Nodes that come and go by a list in a file."""

from pathlib import Path

import pytest

from foreword.cluster.handshake import PeerIdentity, TokenIds
from foreword.cluster.node_registry import NodePeer, NodeRegistry
from foreword.cluster.security import Security
from foreword.cluster.settings import RemoteConfig
from foreword.errors import RequestError


class Thread:
    """A connection that is never made."""

    def __init__(self, peer: NodePeer, hub: "Hub", identity: PeerIdentity) -> None:
        self._peer = peer
        self._hub = hub

    def start(self) -> None:
        self._hub.threads.append(f"+{self._peer.name}")

    def close(self) -> None:
        self._hub.threads.append(f"-{self._peer.name}")


class Hub:
    def __init__(self) -> None:
        self.threads: list[str] = []
        self.peers: list[str] = []

    def joined(self, peer: NodePeer) -> None:
        self.peers.append(peer.name)

    def left(self, peer: NodePeer) -> None:
        self.peers.remove(peer.name)


def test_nodes_join_and_leave_as_the_file_says(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, hub = tmp_path / "nodes", Hub()
    path.write_text("")
    config = RemoteConfig(f"@{path}")
    roster = NodeRegistry(config, [], hub, PeerIdentity(Security(), TokenIds(3, lambda token: b"")), Thread)
    path.write_text("127.0.0.1:1\nunix:/run/d2\n")
    roster.check_nodes()
    assert hub.peers == ["127.0.0.1:1", "unix:/run/d2"]
    path.write_text("unix:/run/d2\nunix:/run/d3\n")
    roster.check_nodes()
    roster.check_nodes()
    assert hub.peers == ["unix:/run/d2", "unix:/run/d3"]
    assert hub.threads == ["+127.0.0.1:1", "+unix:/run/d2", "-127.0.0.1:1", "+unix:/run/d3"]
    for text in ("nowhere", None):
        path.unlink() if text is None else path.write_text(text)
        roster.check_nodes()
        assert len(hub.peers) == 2
    path.write_text("unix:/run/d2\nunix:/run/d3\n192.168.0.1:7\n")
    for _ in range(3):
        roster.check_nodes()  # another machine, and neither token nor TLS
    assert len(hub.peers) == 2
    assert sum("cluster token" in record.message for record in caplog.records) == 1


def test_a_list_that_is_not_there_is_refused_at_once(tmp_path: Path):
    with pytest.raises(RequestError, match="list of draft nodes"):
        RemoteConfig(f"@{tmp_path}/nothing")
