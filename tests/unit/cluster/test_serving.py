"""A node's sockets: strangers, silence, and what a target may not say."""

import logging
import socket

import pytest

from foreword.cluster import handshake
from foreword.cluster.address import NodeAddress
from foreword.cluster.framing import FrameSplitter
from foreword.cluster.handshake import Identity, NodeFacts, greet_node
from foreword.cluster.messages import Commit, Commits, Hello, Open, Ping, Pong, Sampling, encode, from_node
from foreword.cluster.node import serving
from foreword.cluster.node.desk import DraftDesk, NodeLimits
from foreword.cluster.node.serving import DraftNode
from foreword.cluster.node.session import Pace
from foreword.cluster.security import Security
from foreword.cluster.vocabulary import TokenIds
from foreword.drafters.lookup.ngram import NgramConfig, NgramDrafter
from helpers.draft_nodes import until

IDS = TokenIds(100, lambda token: str(token).encode())


@pytest.fixture
def node():
    desk = DraftDesk(NgramDrafter(NgramConfig(prompt_lookup_min=1)), Pace.AT_ONCE, NodeLimits(100, 1000))
    one = DraftNode(desk, Identity(Security(), IDS), NodeFacts("ngram", 10), NodeAddress("127.0.0.1", 0))
    one.start()
    yield one
    one.close()


def connected(node: DraftNode) -> socket.socket:
    link = node.address.connect(5.0)
    greet_node(link, Identity(Security(), IDS))
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
        link.sendall(encode(Commits([Commit(0, 5, [], 2, 2)])) + encode(Ping(7)))
        assert heard(link, Pong) == Pong(7)
        until(lambda: node.sessions == 1)
    until(lambda: node.sessions == 0 and node.targets == 0)


@pytest.mark.parametrize(
    "said",
    [
        encode(Open(0, [100], 1, Sampling(100))),
        encode(Open(0, [1], 1, Sampling(100))) + encode(Commits([Commit(0, 2, [100], 1, 1)])),
        encode(Hello(1, b"n" * 32, b"", 1, IDS.told())),
        encode(Ping(1))[:-1] + b"?",
        b"\xff" * 64,
    ],
    ids=["a token that is none", "one later", "a second handshake", "a damaged frame", "garbage"],
)
def test_a_target_that_says_what_it_must_not_is_hung_up_on_and_others_are_served(
    node: DraftNode, said: bytes, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO), connected(node) as good, connected(node) as bad:
        bad.sendall(said)
        while bad.recv(4096):  # until it hangs up
            pass
        until(lambda: node.targets == 1)
        good.sendall(encode(Ping(3)))
        assert heard(good, Pong) == Pong(3)
    assert sum("is gone" in entry.getMessage() for entry in caplog.records) >= 1


def test_strangers_are_many_but_not_too_many(node: DraftNode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handshake, "PATIENCE", 5.0)
    silent = [node.address.connect(5.0) for _ in range(serving.MAX_STRANGERS + 1)]
    hung_up = 0
    for link in silent:
        link.settimeout(20)
        hung_up += link.recv(4096) == b""  # the others are challenged
    assert hung_up == 1
    for link in silent:
        link.close()
    until(lambda: node._strangers._value == serving.MAX_STRANGERS)
    connected(node).close()


def test_a_node_that_stops_hangs_up(node: DraftNode):
    link = connected(node)
    node.close()
    while link.recv(4096):
        pass
    link.close()
