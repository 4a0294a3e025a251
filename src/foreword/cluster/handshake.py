"""The first frames of a connection: both sides prove that they know the token and that their token ids agree."""

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic
from typing import TypeVar

from foreword.cluster.framing import HEADER, ChannelError
from foreword.cluster.messages import (
    VERSION,
    Challenge,
    FromNode,
    HandshakeRefusal,
    Hello,
    ToNode,
    VocabularyDigest,
    Welcome,
    encode,
    from_node,
    to_node,
)
from foreword.cluster.security import NODE, TARGET, Security


@dataclass
class TokenIds:
    """What the ids of one side mean, in order."""

    size: int
    bytes_of: Callable[[int], bytes]  # a token's
    _digests: dict[int, bytes] = field(default_factory=dict)  # of the first so many

    def digest(self) -> VocabularyDigest:
        """Return what the other side compares."""
        return VocabularyDigest(self.size, self._digest(self.size))

    def agrees(self, theirs: VocabularyDigest) -> bool:
        """One side may have some more at the end; the one that has more is the one that can tell."""
        return theirs.size > self.size or self._digest(theirs.size) == theirs.digest

    def _digest(self, size: int) -> bytes:
        if size not in self._digests:
            digest = sha256()
            for token in range(size):
                meant = self.bytes_of(token)
                digest.update(len(meant).to_bytes(4, "big") + meant)
            self._digests[size] = digest.digest()
        return self._digests[size]


FIRST_FRAMES = 16 * 1024
"""Longest frame of a side that has not proved who it is."""

PATIENCE = 5.0
"""Seconds that all of a handshake may take."""

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class PeerIdentity:
    """What one side tells of itself."""

    security: Security
    vocabulary: TokenIds
    incarnation: int = field(default_factory=lambda: secrets.randbits(62))


@dataclass(frozen=True)
class NodeFacts:
    """What a node tells besides."""

    method: str
    capacity: int
    labels: dict[str, str] = field(default_factory=dict)


class _Talk:
    """Reads whole frames from a blocking socket until its time is over."""

    def __init__(self, connected: socket.socket, patience: float) -> None:
        self._socket = connected
        self._until = monotonic() + patience

    def say(self, message: ToNode | FromNode) -> None:
        self._socket.settimeout(max(self._until - monotonic(), 0.01))
        self._socket.sendall(encode(message))

    def hear(self, decode: Callable[[bytes], object], wanted: type[_Kind]) -> _Kind:
        """Return the next message, which must be of this type. No byte after it is read."""
        (length,) = HEADER.unpack(self._exactly(HEADER.size))
        if length > FIRST_FRAMES:
            raise ChannelError(f"a frame claims {length} bytes, over the limit of {FIRST_FRAMES}")
        message = decode(self._exactly(length))
        if isinstance(message, HandshakeRefusal):
            raise ChannelError(f"refused: {message.reason}")
        if not isinstance(message, wanted):
            raise ChannelError("the handshake is out of order")
        return message

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            left = self._until - monotonic()
            if left <= 0:
                raise ChannelError("no handshake in time")
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(count - len(found))
            except TimeoutError:
                continue
            if not data:
                raise ChannelError("the other side hung up during the handshake")
            found += data
        return found

    def check(
        self, own: PeerIdentity, other: Hello | Welcome, who: bytes, theirs: bytes, ours: bytes
    ) -> None:
        """Refuse the other side unless it knows the token and its token ids mean the same."""
        if not own.security.is_proof(other.proof, who, theirs, ours):
            raise self.refuse("another cluster token")
        if not own.vocabulary.agrees(other.vocabulary):
            raise self.refuse(
                "another vocabulary: the token ids of target and draft model do not mean the same"
            )

    def refuse(self, reason: str) -> ChannelError:
        """Tell the other side why, and return what is to be raised."""
        with suppress(OSError):  # it may have gone already
            self.say(HandshakeRefusal(reason))
        return ChannelError(reason)


def greet_target(
    connected: socket.socket, identity: PeerIdentity, facts: NodeFacts, patience: float = PATIENCE
) -> Hello:
    """Do a node's part of the handshake. Raises `ChannelError` or `OSError` if the target is not let in."""
    talk, nonce = _Talk(connected, patience), secrets.token_bytes(32)
    talk.say(Challenge(VERSION, nonce))
    hello = talk.hear(to_node, Hello)
    if hello.version != VERSION:
        raise talk.refuse(f"protocol version {hello.version}, and this node speaks {VERSION}")
    talk.check(identity, hello, TARGET, hello.nonce, nonce)
    proof = identity.security.proof(NODE, hello.nonce, nonce)
    digest = identity.vocabulary.digest()
    talk.say(Welcome(proof, identity.incarnation, digest, facts.method, facts.capacity, facts.labels))
    return hello


def greet_node(connected: socket.socket, identity: PeerIdentity, patience: float = PATIENCE) -> Welcome:
    """Do a target's part of the handshake. Raises `ChannelError` or `OSError` if the node is not to be used."""
    talk, nonce = _Talk(connected, patience), secrets.token_bytes(32)
    challenge = talk.hear(from_node, Challenge)
    if challenge.version != VERSION:
        raise talk.refuse(f"protocol version {challenge.version}, and this target speaks {VERSION}")
    proof = identity.security.proof(TARGET, challenge.nonce, nonce)
    talk.say(Hello(VERSION, nonce, proof, identity.incarnation, identity.vocabulary.digest()))
    welcome = talk.hear(from_node, Welcome)
    talk.check(identity, welcome, NODE, challenge.nonce, nonce)
    return welcome
