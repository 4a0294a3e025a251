"""Connection handshake: both sides prove that they know the cluster token and that their token ids agree."""

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
    """The vocabulary of a target or of a node."""

    size: int  # number of token ids
    bytes_of: Callable[[int], bytes]  # returns the bytes of a token
    _digests: dict[int, bytes] = field(default_factory=dict)  # n -> SHA-256 of the first n tokens

    def digest(self) -> VocabularyDigest:
        """Return the digest to send to the other side; the first call takes long."""
        return VocabularyDigest(self.size, self._digest(self.size))

    def agrees(self, theirs: VocabularyDigest) -> bool:
        """Return whether the token ids of both sides mean the same tokens, as far as this side can compare.

        The side with the larger vocabulary compares the ids that both have; the other side returns True.
        """
        return theirs.size > self.size or self._digest(theirs.size) == theirs.digest

    def _digest(self, size: int) -> bytes:
        """Return the SHA-256 of the first `size` tokens."""
        if size not in self._digests:
            digest = sha256()
            for token in range(size):
                encoded = self.bytes_of(token)
                digest.update(len(encoded).to_bytes(4, "big") + encoded)
            self._digests[size] = digest.digest()
        return self._digests[size]


FIRST_FRAMES = 16 * 1024  # maximum frame size before authentication
HANDSHAKE_SECONDS = 5.0  # timeout of a handshake in seconds

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class PeerIdentity:
    """Identity of a target or of a node."""

    security: Security
    vocabulary: TokenIds
    incarnation: int = field(default_factory=lambda: secrets.randbits(62))  # changes with every start


@dataclass(frozen=True)
class NodeFacts:
    """Properties of a node that it sends to targets."""

    method: str  # method of the node's drafter
    capacity: int  # maximum concurrent sessions
    labels: dict[str, str] = field(default_factory=dict)  # host, rack, zone


class _HandshakeChannel:
    """Sends and receives frames on a blocking socket until a deadline."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        self._socket = connected
        self._until = monotonic() + timeout

    def send(self, message: ToNode | FromNode) -> None:
        self._socket.settimeout(max(self._until - monotonic(), 0.01))
        self._socket.sendall(encode(message))

    def receive(self, decode: Callable[[bytes], object], wanted: type[_Kind]) -> _Kind:
        """Return the next message, and read no byte beyond it; raise `ChannelError` if it has another type."""
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
        """Return the next `count` bytes."""
        received = b""
        while len(received) < count:
            left = self._until - monotonic()
            if left <= 0:
                raise ChannelError("no handshake in time")
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(count - len(received))
            except TimeoutError:
                continue
            if not data:
                raise ChannelError("the other side hung up during the handshake")
            received += data
        return received

    def check(
        self, ours: PeerIdentity, theirs: Hello | Welcome, role: bytes, their_nonce: bytes, our_nonce: bytes
    ) -> None:
        """Refuse the peer, which has this role, unless it knows the cluster token and its vocabulary agrees."""
        if not ours.security.is_proof(theirs.proof, role, their_nonce, our_nonce):
            raise self.refuse("another cluster token")
        if not ours.vocabulary.agrees(theirs.vocabulary):
            raise self.refuse(
                "another vocabulary: the token ids of target and draft model do not mean the same"
            )

    def refuse(self, reason: str) -> ChannelError:
        """Send the reason to the peer, and return the exception to raise."""
        with suppress(OSError):  # the peer may have disconnected
            self.send(HandshakeRefusal(reason))
        return ChannelError(reason)


def greet_target(
    connected: socket.socket, identity: PeerIdentity, facts: NodeFacts, timeout: float = HANDSHAKE_SECONDS
) -> Hello:
    """Perform the node's part of the handshake; return the target's `Hello`.

    Raise `ChannelError` or `OSError` if the handshake fails or a side refuses the other.
    """
    channel, nonce = _HandshakeChannel(connected, timeout), secrets.token_bytes(32)
    channel.send(Challenge(VERSION, nonce))
    hello = channel.receive(to_node, Hello)
    if hello.version != VERSION:
        raise channel.refuse(f"protocol version {hello.version}, and this node speaks {VERSION}")
    channel.check(identity, hello, TARGET, hello.nonce, nonce)
    proof = identity.security.proof(NODE, hello.nonce, nonce)
    digest = identity.vocabulary.digest()
    channel.send(Welcome(proof, identity.incarnation, digest, facts.method, facts.capacity, facts.labels))
    return hello


def greet_node(
    connected: socket.socket, identity: PeerIdentity, timeout: float = HANDSHAKE_SECONDS
) -> Welcome:
    """Perform the target's part of the handshake; return the node's `Welcome`. Errors are those of `greet_target`."""
    channel, nonce = _HandshakeChannel(connected, timeout), secrets.token_bytes(32)
    challenge = channel.receive(from_node, Challenge)
    if challenge.version != VERSION:
        raise channel.refuse(f"protocol version {challenge.version}, and this target speaks {VERSION}")
    proof = identity.security.proof(TARGET, challenge.nonce, nonce)
    channel.send(Hello(VERSION, nonce, proof, identity.incarnation, identity.vocabulary.digest()))
    welcome = channel.receive(from_node, Welcome)
    channel.check(identity, welcome, NODE, challenge.nonce, nonce)
    return welcome
