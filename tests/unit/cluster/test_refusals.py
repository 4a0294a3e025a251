"""Peers that are refused again and again do not fill a draft node's log."""

import logging

import pytest

from foreword.cluster.address import NodeAddress
from foreword.cluster.framing import ChannelError
from foreword.cluster.handshake import NodeFacts, PeerIdentity, TokenIds, greet_node
from foreword.cluster.node_server import MOST_KNOWN, REPEAT_SECONDS, DraftNode, RefusalLog
from foreword.cluster.node_service import DraftService, NodeLimits
from foreword.cluster.node_session import Pace
from foreword.cluster.security import Security
from foreword.drafters.lookup.ngram import NgramConfig, NgramDrafter
from helpers.clocks import ScriptedClock
from helpers.waiting import wait_until

IDS = TokenIds(100, lambda token: str(token).encode())


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="foreword.cluster")
    return lambda: [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]


def test_a_host_is_logged_once_and_then_rarely_with_the_number(lines):
    clock = ScriptedClock()
    log = RefusalLog(clock)
    for _ in range(100):
        log.note("10.0.0.7", "another cluster token")
        clock.pass_by(REPEAT_SECONDS / 200)
    assert lines() == ["target 10.0.0.7 is refused: another cluster token"]
    log.note("10.0.0.8", "another cluster token")
    log.note("10.0.0.7", "another vocabulary")
    assert len(lines()) == 3
    clock.pass_by(REPEAT_SECONDS)
    log.note("10.0.0.7", "another cluster token")
    assert lines()[-1].endswith("another cluster token (99 more since the last such line)")


def test_reasons_that_a_peer_makes_up_do_not_fill_the_log_or_the_memory(lines):
    log = RefusalLog(ScriptedClock())
    for number in range(10 * MOST_KNOWN):
        log.note("10.0.0.7", f"protocol version {number}")
    assert len(lines()) == MOST_KNOWN + 1
    assert len(log._known) == MOST_KNOWN + 1


def test_a_wrong_token_is_logged_once_for_all_connections_of_a_host(lines):
    service = DraftService(
        NgramDrafter(NgramConfig(prompt_lookup_min=1)), Pace.AT_ONCE, NodeLimits(100, 1000)
    )
    identity = PeerIdentity(Security(b"the cluster's own token"), IDS)
    node = DraftNode(service, identity, NodeFacts("ngram", 10), NodeAddress("127.0.0.1", 0))
    node.start()
    try:
        for _ in range(3):
            with (
                node.address.connect(5.0) as link,
                pytest.raises(ChannelError, match="another cluster token"),
            ):
                greet_node(link, PeerIdentity(Security(b"not the cluster's token"), IDS))
        wait_until(lambda: node._refusals._known and _held(node) == 2)
        assert lines() == ["target 127.0.0.1 is refused: another cluster token"]
    finally:
        node.close()


def _held(node: DraftNode) -> int:
    return sum(one[1] for one in node._refusals._known.values())
