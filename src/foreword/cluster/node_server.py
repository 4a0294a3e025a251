"""Sockets and threads of a draft node: one thread accepts targets, one drafts, and each target has one."""

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue
from time import monotonic

from foreword.cluster import messages
from foreword.cluster.address import NodeAddress, without_delay
from foreword.cluster.connection import Connection
from foreword.cluster.framing import ChannelError
from foreword.cluster.handshake import HANDSHAKE_SECONDS, NodeFacts, PeerIdentity, greet_target
from foreword.cluster.node_service import DraftService

_log = logging.getLogger(__name__)

MAX_TARGETS = 256  # maximum number of connected targets
MAX_HANDSHAKES = 64  # maximum number of concurrent handshakes; further connections are closed
MAX_MAIL = 4096  # maximum number of queued messages; beyond it, the threads of targets stop reading
LOAD_SECONDS = 1.0  # seconds between load reports


@dataclass(eq=False)
class _TargetLink:
    """One target's connection, for the drafting thread."""

    connection: Connection[messages.ToNode]
    reported_at: float = float("-inf")  # time of the last load report


_Mail = tuple[_TargetLink, messages.ToNode | None]
"""(target, its message); None: the target has disconnected."""


class DraftNode:
    """Serves one drafter to many targets until closed."""

    def __init__(
        self, service: DraftService, identity: PeerIdentity, facts: NodeFacts, address: NodeAddress
    ) -> None:
        """Listen on `address`; targets are accepted after `start`."""
        self._service = service
        self._identity = identity
        self._facts = facts
        tls = identity.security.tls
        self._tls = None if tls is None else tls.context(is_node=True)
        self._listening = address.listen()
        self.address = address.bound(self._listening)
        self._mail: Queue[_Mail] = Queue(MAX_MAIL)
        self._links: set[_TargetLink] = set()
        self._lock = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._refusals = RefusalLog()
        self._is_closed = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"draft-node-{name}", daemon=True)
            for name, work in (("accept", self._accept), ("draft", self._draft))
        ]

    def start(self) -> None:
        self._identity.vocabulary.digest()  # computed before the first handshake
        for thread in self._threads:
            thread.start()

    @property
    def sessions(self) -> int:
        """Number of sessions of all targets."""
        return len(self._service)

    @property
    def targets(self) -> int:
        """Number of connected targets."""
        with self._lock:
            return len(self._links)

    def drain(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        """Request all targets to move their sessions, and wait until none is left, at most `seconds`."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.connection.send(messages.NodeDrain())
        until = clock() + seconds
        while self.sessions and clock() < until and not self._is_closed.wait(0.05):
            pass

    def close(self) -> None:
        """Stop listening, end all connections, and wait for the threads."""
        self._is_closed.set()
        with suppress(OSError):  # shutdown fails on a listening socket on some systems
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.connection.close("the node stops")
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _accept(self) -> None:
        """Accept connections, each served by a thread; the accepting thread runs this."""
        while not self._is_closed.is_set():
            try:
                connected, _ = self._listening.accept()
            except OSError:
                if self._is_closed.wait(0.1):
                    return
                continue
            if not self._handshakes.acquire(blocking=False):
                connected.close()
                continue
            threading.Thread(
                target=self._serve, args=(connected,), name="draft-node-target", daemon=True
            ).start()

    def _serve(self, connected: socket.socket) -> None:
        """Serve one target from its handshake to its disconnection; the target's thread runs this."""
        with connected:
            host, name = _peer_names(connected)
            try:
                protected = self._handshake(connected)
            except (ChannelError, OSError) as error:
                self._refusals.note(host, str(error))
                return
            finally:
                self._handshakes.release()
            link = _TargetLink(Connection(protected, messages.to_node))
            with self._lock:
                self._links.add(link)
            if self._is_closed.is_set():
                link.connection.close("the node stops")
            _log.info("target %s is connected", name)
            reason = link.connection.run(
                lambda message: self._take(link, message), lambda: self._report(link)
            )
            _log.info("target %s is disconnected: %s", name, reason)
            with self._lock:
                self._links.discard(link)
            if not self._is_closed.is_set():
                self._mail.put((link, None))

    def _handshake(self, connected: socket.socket) -> socket.socket:
        """Perform the handshake with a target; return the socket, wrapped in TLS if the node has TLS files."""
        connected.settimeout(HANDSHAKE_SECONDS)
        without_delay(connected)
        with self._lock:
            is_full = len(self._links) >= MAX_TARGETS
        if is_full:
            raise ChannelError(f"there are {MAX_TARGETS} targets already")
        protected: socket.socket | ssl.SSLSocket = connected
        if self._tls is not None:
            protected = self._tls.wrap_socket(connected, server_side=True)
        greet_target(protected, self._identity, self._facts)
        return protected

    def _take(self, link: _TargetLink, message: messages.ToNode) -> None:
        """Answer a ping, or queue a message for the drafting thread."""
        if isinstance(message, messages.Ping):
            link.connection.send(messages.Pong(message.number))
        elif isinstance(message, messages.Open | messages.Commits | messages.Close):
            self._mail.put((link, message))
        else:
            raise ChannelError(f"a {type(message).__name__} after the handshake")

    def _report(self, link: _TargetLink) -> None:
        """Send a load report if one is due."""
        now = monotonic()
        if now - link.reported_at >= LOAD_SECONDS:
            link.reported_at = now
            link.connection.send(self._service.load())

    def _draft(self) -> None:
        """Apply messages and call the drafter in turn, until closed; the drafting thread runs this."""
        is_busy = False
        while not self._is_closed.is_set():
            self._read_mail(may_wait=not is_busy)
            by_target = self._service.round()
            is_busy = bool(by_target)
            for link, drafts in by_target.items():
                if drafts and isinstance(link, _TargetLink):
                    link.connection.send(messages.SessionDrafts(drafts))

    def _read_mail(self, may_wait: bool) -> None:
        """Apply all queued messages; with `may_wait`, wait for the first one."""
        while not self._is_closed.is_set():
            try:
                link, message = self._mail.get(timeout=0.2) if may_wait else self._mail.get_nowait()
            except Empty:
                if may_wait:
                    continue
                return
            may_wait = False
            try:
                self._apply(link, message)
            except ChannelError as error:
                link.connection.close(str(error))

    def _apply(self, link: _TargetLink, message: messages.ToNode | None) -> None:
        """Apply a target's message to the service, and send its reply."""
        service = self._service
        if message is None:
            service.leave(link)
        elif not link.connection.is_open:
            return  # the sessions end when the target's disconnection is read
        elif isinstance(message, messages.Open):
            for target, busy in service.open(link, message):
                assert isinstance(target, _TargetLink)
                target.connection.send(busy)
        elif isinstance(message, messages.Commits):
            for commit in message.commits:
                lagging = service.commit(link, commit)
                if lagging is not None:
                    link.connection.send(lagging)
        elif isinstance(message, messages.Close):
            service.close(link, message)


def _peer_names(connected: socket.socket) -> tuple[str, str]:
    """Return the peer's host, and its host with port, for log lines."""
    try:
        peer = connected.getpeername()
    except OSError:
        return "(gone)", "(gone)"
    if not isinstance(peer, tuple):
        return "on this machine", "on this machine"
    return str(peer[0]), f"{peer[0]}:{peer[1]}"


REPEAT_SECONDS = 600.0  # seconds between log lines about the same host and reason

MOST_KNOWN = 256
"""Maximum number of (host, reason) pairs with separate log lines. Further pairs share one: peers may invent reasons."""

_OTHERS = ("other hosts", "several reasons")


class RefusalLog:
    """Logs the first refusal of a host for a reason immediately, and repetitions with a count; thread-safe."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        # (host, reason) -> (time of the last log line, number of refusals since then)
        self._known: dict[tuple[str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def note(self, host: str, reason: str) -> None:
        """Log a refusal, or count it for the next line."""
        with self._lock:
            now = self._clock()
            pair = (host, reason)
            if pair not in self._known and len(self._known) >= MOST_KNOWN:
                pair = _OTHERS
            logged_at, unlogged = self._known.get(pair, (-REPEAT_SECONDS, 0))
            if pair in self._known and now - logged_at < REPEAT_SECONDS:
                self._known[pair] = logged_at, unlogged + 1
                return
            self._known[pair] = now, 0
        more = f" ({unlogged} more since the last such line)" if unlogged else ""
        _log.warning("target %s is refused: %s%s", *pair, more)
