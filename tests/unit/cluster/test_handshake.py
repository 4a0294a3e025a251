"""Who is let in: both sides prove the token, and that their token ids mean the same."""

import socket
import stat
import threading
from pathlib import Path

import pytest

from foreword.cluster import handshake
from foreword.cluster.address import NodeAddress
from foreword.cluster.framing import ChannelError, FrameSplitter
from foreword.cluster.handshake import NodeFacts, PeerIdentity, TokenIds, greet_node, greet_target
from foreword.cluster.messages import (
    Challenge,
    Hello,
    Ping,
    Pong,
    VocabularyDigest,
    Welcome,
    encode,
    from_node,
    to_node,
)
from foreword.cluster.security import NODE, Security, tenant_hash
from foreword.cluster.settings import RemoteConfig, parse_labels
from foreword.errors import RequestError

TOKEN = b"a token of the cluster"


def identity(token: bytes = TOKEN, size: int = 50, prefix: str = "t") -> PeerIdentity:
    return PeerIdentity(Security(token), TokenIds(size, lambda token: f"{prefix}{token}".encode()), 7)


def meet(target: PeerIdentity, node: PeerIdentity) -> tuple[object, object]:
    """What each side gets of a handshake: its message, or the error."""
    ours, theirs = socket.socketpair()
    got: list[object] = []

    def serve() -> None:
        try:
            got.append(greet_target(theirs, node, NodeFacts("ngram", 9, {"zone": "z"}), 5.0))
        except (ChannelError, OSError) as error:
            got.append(error)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        answer: object = greet_node(ours, target, 5.0)
    except (ChannelError, OSError) as error:
        answer = error
    ours.close()
    serving.join()
    theirs.close()
    return answer, got[0]


def test_both_sides_learn_who_the_other_is():
    welcome, hello = meet(identity(), identity())
    assert isinstance(welcome, Welcome)
    assert (welcome.method, welcome.capacity, welcome.labels) == ("ngram", 9, {"zone": "z"})
    assert isinstance(hello, Hello)
    assert hello.incarnation == 7


@pytest.mark.parametrize("token", [b"", b"another token, longer"])
def test_another_token_is_refused_with_one_line(token: bytes):
    answer, served = meet(identity(token), identity())
    assert str(answer) == "refused: another cluster token"
    assert str(served) == "another cluster token"


def test_a_node_that_does_not_know_the_token_is_not_used():
    """It lets everybody in, and cannot prove that it may."""
    ours, theirs = socket.socketpair()

    def pretend() -> None:
        theirs.sendall(encode(Challenge(1, b"n" * 32)))
        theirs.recv(4096)
        theirs.sendall(encode(Welcome(b"p" * 32, 1, identity().vocabulary.digest(), "ngram", 9)))

    pretending = threading.Thread(target=pretend)
    pretending.start()
    with pytest.raises(ChannelError, match="another cluster token"):
        greet_node(ours, identity(), 5.0)
    pretending.join()
    ours.close()
    theirs.close()


def test_another_vocabulary_is_refused():
    answer, served = meet(identity(prefix="x"), identity())
    assert "another vocabulary" in str(answer)
    assert "another vocabulary" in str(served)


def test_one_side_may_have_some_more_tokens_at_the_end():
    assert isinstance(meet(identity(size=50), identity(size=60))[0], Welcome)
    assert isinstance(meet(identity(size=60), identity(size=50))[0], Welcome)
    answer, _ = meet(identity(size=60, prefix="x"), identity(size=50))
    assert "another vocabulary" in str(answer)  # the target, which has more, is the one that can tell


def test_order_counts_and_lengths_do_not_run_together():
    first = TokenIds(2, lambda token: [b"ab", b"c"][token])
    second = TokenIds(2, lambda token: [b"a", b"bc"][token])
    assert not first.agrees(second.digest())
    assert not first.agrees(VocabularyDigest(2, b""))


def test_an_old_version_is_refused_by_either_side(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = socket.socketpair()
    theirs.sendall(encode(Challenge(99, b"n" * 32)))
    with pytest.raises(ChannelError, match="protocol version 99, and this target speaks 1"):
        greet_node(ours, identity(), 5.0)
    ours.close()
    theirs.close()
    ours, theirs = socket.socketpair()
    ours.sendall(encode(Hello(0, b"n" * 32, b"", 1, identity().vocabulary.digest())))
    with pytest.raises(ChannelError, match="protocol version 0, and this node speaks 1"):
        greet_target(theirs, identity(), NodeFacts("ngram", 1), 5.0)
    refused = FrameSplitter().feed(ours.recv(4096))[1]
    assert "version" in from_node(refused).reason
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "over the limit"),
        (encode(Ping(1)), "out of order"),
        (b"\0\0\0\4abcd", "damaged"),
        (b"\0\0\0\2ab", "damaged"),
        (b"", "hung up"),
    ],
    ids=["another protocol", "another message", "garbage", "a short frame", "nothing"],
)
def test_whoever_does_not_speak_the_protocol_is_turned_away(said: bytes, why: str):
    ours, theirs = socket.socketpair()
    ours.sendall(said)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelError, match=why):
        greet_target(theirs, identity(), NodeFacts("ngram", 1), 5.0)
    ours.close()
    theirs.close()


def test_who_says_nothing_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = socket.socketpair()
    times = iter([0.0, 0.0, 0.0, 6.0])
    monkeypatch.setattr(handshake, "monotonic", lambda: next(times))
    ours.sendall(b"\0")  # a byte now and then does not buy time
    with pytest.raises(ChannelError, match="no handshake in time"):
        greet_target(theirs, identity(), NodeFacts("ngram", 1), 5.0)
    ours.close()
    theirs.close()


def test_what_comes_right_behind_the_handshake_is_left_for_the_connection():
    ours, theirs = socket.socketpair()
    security = Security(TOKEN)

    def serve() -> None:
        theirs.sendall(encode(Challenge(1, b"n" * 32)))
        hello = to_node(FrameSplitter().feed(theirs.recv(4096))[0])
        proof = security.proof(NODE, hello.nonce, b"n" * 32)
        welcome = Welcome(proof, 1, identity().vocabulary.digest(), "ngram", 9)
        theirs.sendall(encode(welcome) + encode(Pong(1)))

    serving = threading.Thread(target=serve)
    serving.start()
    assert isinstance(greet_node(ours, identity(), 5.0), Welcome)
    serving.join()
    assert ours.recv(4096) == encode(Pong(1))
    ours.close()
    theirs.close()


def test_a_proof_holds_for_one_connection_and_one_side():
    security = Security(TOKEN)
    proof = security.proof(b"target", b"node's nonce", b"target's nonce")
    assert security.is_proof(proof, b"target", b"target's nonce", b"node's nonce")
    assert not security.is_proof(proof, b"node", b"target's nonce", b"node's nonce")
    assert not security.is_proof(proof, b"target", b"target's nonce", b"another nonce")


def test_tenants_are_told_apart_without_their_names():
    assert tenant_hash("", TOKEN) == b""
    assert tenant_hash("bank", TOKEN) != tenant_hash("shop", TOKEN)
    assert b"bank" not in tenant_hash("bank", TOKEN)


def test_the_token_file_must_be_ones_own(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text("a token of the cluster\n")
    path.chmod(0o644)
    with pytest.raises(RequestError, match="chmod 600"):
        Security.of(str(path))
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert Security.of(str(path)).token == TOKEN
    path.write_text("short")
    with pytest.raises(RequestError, match="at least 16"):
        Security.of(str(path))


def test_other_machines_need_token_and_tls():
    there, here = NodeAddress.parse("192.0.2.1:9"), NodeAddress.parse("127.0.0.1:9")
    for security, missing in (
        (Security(), "a cluster token.* and TLS files"),
        (Security(TOKEN), "TLS files"),
    ):
        with pytest.raises(RequestError, match=missing):
            security.check(there)
        security.check(there, insecure=True)
        security.check(here)


def test_addresses():
    assert str(NodeAddress.parse("host:9")) == "host:9"
    assert str(NodeAddress.parse("[::1]:9")) == "[::1]:9"
    assert str(NodeAddress.parse("unix:/a/b")) == "unix:/a/b"
    assert NodeAddress.parse("[::1]:9").is_local
    assert NodeAddress.parse("unix:/a").is_local
    assert not NodeAddress.parse("example.org:9").is_local
    for text in ("host", ":9", "host:x", "host:70000", "unix:", ""):
        with pytest.raises(RequestError, match="address"):
            NodeAddress.parse(text)


def test_settings_are_refused_by_name():
    assert len(RemoteConfig("a:1, b:2,a:1").addresses()) == 2
    assert parse_labels("host=a, zone=b") == {"host": "a", "zone": "b"}
    for settings, why in (
        ({"drafters": " ,"}, "at least one"),
        ({"drafters": "a:1", "labels": "row=1"}, "labels are"),
    ):
        with pytest.raises(RequestError, match=why):
            RemoteConfig(**settings)
