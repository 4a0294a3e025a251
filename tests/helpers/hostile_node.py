"""A node that knows the token and says whatever might change a text."""

import random
import socket
import threading

from foreword.cluster.address import NodeAddress
from foreword.cluster.framing import FrameSplitter, framed
from foreword.cluster.handshake import NodeFacts, PeerIdentity, greet_target
from foreword.cluster.messages import (
    Commits,
    Open,
    SessionDraft,
    SessionDrafts,
    ToNode,
    encode,
    from_node,
    to_node,
)


class HostileNode:
    """Answers every commit with guesses: wrong ones, for other texts, of other sessions, too long, too many."""

    def __init__(self, identity: PeerIdentity, vocab_size: int, seed: int = 0) -> None:
        self._identity = identity
        self._size = vocab_size
        self._rng = random.Random(seed)
        self._listening = NodeAddress("127.0.0.1", 0).listen()
        self.address = NodeAddress("127.0.0.1", 0).bound(self._listening)
        self._lengths: dict[int, int] = {}
        self._number = 0
        self.guesses = 0
        self._connected: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        for one in (self._listening, *self._connected):
            one.close()

    def _serve(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
                self._connected.append(connected)
                greet_target(connected, self._identity, NodeFacts("ngram", 100))
                connected.settimeout(None)
                splitter = FrameSplitter()
                while data := connected.recv(1 << 16):
                    for frame in splitter.feed(data):
                        self._answer(connected, to_node(frame))
            except OSError:
                if self._listening.fileno() < 0:
                    return

    def _answer(self, connected: socket.socket, message: ToNode) -> None:
        if isinstance(message, Open):
            self._lengths[message.session] = len(message.tokens)
        elif isinstance(message, Commits):
            for commit in message.commits:
                self._lengths[commit.session] = commit.length
            guesses = [self._guess(session) for session in self._lengths for _ in range(2)]
            self.guesses += len(guesses)
            connected.sendall(encode(SessionDrafts(guesses)))

    def _guess(self, session: int) -> SessionDraft:
        self._number += 1
        return hostile_guess(self._rng, self._size, session, self._number, self._lengths[session])


def hostile_guess(
    rng: random.Random, vocab_size: int, session: int, number: int, length: int
) -> SessionDraft:
    """Wrong draft tokens, perhaps for another text, of another session, too many or outside the vocabulary."""
    nodes = rng.choice((0, 1, 4, 128))
    tokens = [rng.randrange(vocab_size + rng.choice((0, 0, 50))) for _ in range(nodes)]
    parents = [rng.randrange(-1, node) for node in range(nodes)] if rng.random() < 0.5 else []
    length = max(length + rng.choice((0, 0, 0, -1, -3, 5)), 0)
    number = number if rng.random() < 0.9 else 1 << 60  # nothing newer is ever heard then
    return SessionDraft(
        session + rng.choice((0, 0, 0, 1)), number, length, rng.random() < 0.5, tokens, parents
    )


class Turncoat:
    """Makes the drafts of an honest node hostile, and now and then its whole frame garbage."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._size = vocab_size
        self.spoiled = 0  # drafts

    def __call__(self, frame: bytes) -> bytes:
        """The bytes that the target gets in place of a frame."""
        message = from_node(frame)
        if not isinstance(message, SessionDrafts):
            return framed(frame)
        self.spoiled += len(message.drafts)
        if self._rng.random() < 0.05:
            return framed(self._rng.randbytes(len(frame)))
        return encode(
            SessionDrafts(
                [
                    hostile_guess(self._rng, self._size, one.session, one.number, one.length)
                    for one in message.drafts
                ]
            )
        )
