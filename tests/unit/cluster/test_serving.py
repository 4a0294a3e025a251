"""A node's sockets: strangers, silence, and what a target may not say."""

import logging
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from foreword.cluster import connection, handshake, node_server
from foreword.cluster.address import NodeAddress
from foreword.cluster.connection import Connection
from foreword.cluster.framing import HEADER, FrameSplitter
from foreword.cluster.handshake import NodeFacts, PeerIdentity, TokenIds, greet_node
from foreword.cluster.messages import (
    MAX_FRAME_BYTES,
    Commits,
    Hello,
    Open,
    Ping,
    Pong,
    Sampling,
    SessionCommit,
    encode,
    from_node,
)
from foreword.cluster.node_server import DraftNode
from foreword.cluster.node_service import DraftService, NodeLimits
from foreword.cluster.node_session import Pace
from foreword.cluster.security import Security
from foreword.drafters.lookup.ngram import NgramConfig, NgramDrafter
from helpers.draft_nodes import until

IDS = TokenIds(100, lambda token: str(token).encode())


def node_at(address: NodeAddress) -> DraftNode:
    service = DraftService(
        NgramDrafter(NgramConfig(prompt_lookup_min=1)), Pace.AT_ONCE, NodeLimits(100, 1000)
    )
    one = DraftNode(service, PeerIdentity(Security(), IDS), NodeFacts("ngram", 10), address)
    one.start()
    return one


@pytest.fixture
def node():
    one = node_at(NodeAddress("127.0.0.1", 0))
    yield one
    one.close()


def connected(node: DraftNode) -> socket.socket:
    link = node.address.connect(5.0)
    greet_node(link, PeerIdentity(Security(), IDS))
    link.settimeout(20)
    return link


def heard(link: socket.socket, kind: type) -> object:
    """The next message of this kind."""
    splitter = FrameSplitter()
    while data := link.recv(4096):
        for frame in splitter.feed(data):
            if isinstance(message := from_node(frame), kind):
                return message
    raise AssertionError("it hung up")


def test_a_target_is_served_and_its_sessions_go_with_it(node: DraftNode):
    with connected(node) as link:
        link.sendall(encode(Open(0, [5, 6, 5, 6, 5], 5, Sampling(100))))
        link.sendall(encode(Commits([SessionCommit(0, 5, [], 2, 2)])) + encode(Ping(7)))
        assert heard(link, Pong) == Pong(7)
        until(lambda: node.sessions == 1)
    until(lambda: node.sessions == 0 and node.targets == 0)


def ends(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of targets that are gone, one line each."""
    told = [entry.getMessage() for entry in caplog.records if "is disconnected" in entry.getMessage()]
    assert not any("\n" in line for line in told)
    return told


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (encode(Open(0, [100], 1, Sampling(100))), "token"),
        (
            encode(Open(0, [1], 1, Sampling(100))) + encode(Commits([SessionCommit(0, 2, [100], 1, 1)])),
            "token",
        ),
        (encode(Hello(1, b"n" * 32, b"", 1, IDS.digest())), "a Hello after the handshake"),
        (encode(Ping(1))[:-1] + b"?", "damaged"),
        (HEADER.pack(MAX_FRAME_BYTES + 1), f"a frame claims {MAX_FRAME_BYTES + 1} bytes, over the limit"),
    ],
    ids=["a token that is none", "one later", "a second handshake", "a damaged frame", "an oversized one"],
)
def test_a_target_that_says_what_it_must_not_is_hung_up_on_and_others_are_served(
    node: DraftNode, said: bytes, why: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO), connected(node) as good, connected(node) as bad:
        bad.sendall(said)
        while bad.recv(4096):  # until it hangs up
            pass
        until(lambda: bool(ends(caplog)))
        good.sendall(encode(Ping(3)))
        assert heard(good, Pong) == Pong(3)
        (told,) = ends(caplog)
        assert why in told


def test_a_target_that_does_not_read_is_hung_up_on_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(node_server, "Connection", partial(Connection, max_unsent=1000))
    node = node_at(NodeAddress(path=str(tmp_path / "node")))  # whose buffers are small
    with caplog.at_level(logging.INFO), connected(node) as link:
        until(lambda: node.targets == 1)
        with suppress(OSError):  # when it hangs up
            while node.targets:
                link.sendall(encode(Ping(1)) * 1000)
        until(lambda: bool(ends(caplog)))
    (told,) = ends(caplog)
    assert "it does not read: " in told
    node.close()


def test_a_target_of_which_nothing_is_heard_is_given_up_with_one_line(
    node: DraftNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Half open: its machine is gone without a word, and its sessions go."""
    with caplog.at_level(logging.INFO), connected(node) as link:
        link.sendall(encode(Open(0, [5, 6, 5], 3, Sampling(100))))
        until(lambda: node.sessions == 1)
        monkeypatch.setattr(connection, "SILENCE", 0.0)  # it is over
        until(lambda: node.targets == 0 and node.sessions == 0)
    (told,) = ends(caplog)
    assert "nothing was heard of it for 0 s" in told


def test_strangers_are_many_but_not_too_many(node: DraftNode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 5.0)
    silent = [node.address.connect(5.0) for _ in range(node_server.MAX_HANDSHAKES + 1)]
    hung_up = 0
    for link in silent:
        link.settimeout(20)
        hung_up += link.recv(4096) == b""  # the others are challenged
    assert hung_up == 1
    for link in silent:
        link.close()
    until(lambda: node._handshakes._value == node_server.MAX_HANDSHAKES)
    connected(node).close()


def test_a_node_that_stops_hangs_up(node: DraftNode):
    link = connected(node)
    node.close()
    while link.recv(4096):
        pass
    link.close()
