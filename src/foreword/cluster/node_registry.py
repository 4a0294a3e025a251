"""The draft nodes of a target: their state, and the threads of their connections."""

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Protocol

from foreword.cluster.address import NodeAddress
from foreword.cluster.assignment import NodeCandidate, distance
from foreword.cluster.connection import Connection
from foreword.cluster.framing import ChannelError
from foreword.cluster.handshake import HANDSHAKE_SECONDS, PeerIdentity, greet_node
from foreword.cluster.messages import FromNode, NodeLoad, Ping, ToNode, Welcome, from_node
from foreword.cluster.settings import RemoteConfig
from foreword.cluster.waiting import CircuitBreaker, NodeEstimates
from foreword.errors import RequestError
from foreword.speculation.drafting import NodeReport

_log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between connection attempts: the first pause, which doubles each time, and the maximum."""

PING_SECONDS = 5.0  # seconds between pings


class NodeListener(Protocol):
    """Receives events of nodes, each in the thread of its node."""

    def came_up(self, peer: "NodePeer", link: Connection[FromNode], welcome: Welcome) -> None:
        """A connection has completed its handshake."""

    def went_down(self, peer: "NodePeer", reason: str) -> None:
        """A connection has ended, or could not be made."""

    def on_message(self, peer: "NodePeer", message: FromNode) -> None:
        """A message has arrived."""

    def joined(self, peer: "NodePeer") -> None:
        """A node was added to the list."""

    def left(self, peer: "NodePeer") -> None:
        """A node was removed from the list."""


class NodePeer:
    """State of a node as the target sees it, guarded by the drafter's lock."""

    def __init__(self, address: NodeAddress) -> None:
        self.address = address
        self.name = str(address)
        self.link: Connection[FromNode] | None = None  # None: not connected
        self.welcome: Welcome | None = None  # of the newest connection
        self.load: NodeLoad | None = None  # newest report of this connection
        self.breaker = CircuitBreaker()
        self.estimates = NodeEstimates()
        self.is_draining = False  # whether the node takes no new requests, because it will end
        self.busy_until = float("-inf")  # time until which the node takes no new requests
        self.has_timed_out = False  # whether a wait timed out and no draft has arrived since
        self.assigned = 0  # requests of this target on the node
        self.waits = 0  # passes that waited for the node
        self.wait_seconds = 0.0  # total time of these waits

    @property
    def is_up(self) -> bool:
        """Whether the node is connected."""
        return self.link is not None

    def begin(self, link: Connection[FromNode], welcome: Welcome) -> None:
        """Record a new connection; estimates are reset if the node was restarted."""
        if self.welcome is None or self.welcome.incarnation != welcome.incarnation:
            self.estimates = NodeEstimates()
        self.link, self.welcome, self.load = link, welcome, None
        self.is_draining = self.has_timed_out = False
        self.busy_until = float("-inf")
        self.breaker.reason = "nothing heard of it yet"

    def end(self, reason: str) -> None:
        """Record that the connection and all its sessions have ended."""
        self.link = None
        self.assigned = 0
        self.breaker.record_loss(reason)

    def send(self, message: ToNode) -> None:
        """Send a message if the node is connected."""
        if self.link is not None:
            self.link.send(message)

    def is_used(self, shadow: int) -> bool:
        """Return whether the node's drafts are verified. Its first `shadow` drafts are only compared with the text."""
        return self.is_up and self.estimates.judged >= shadow

    def takes(self, now: float) -> bool:
        """Return whether requests may be assigned to the node."""
        return self.is_up and not self.is_draining and now >= self.busy_until

    def candidate(self, labels: Mapping[str, str]) -> NodeCandidate:
        """Return the node as a candidate for a request of a target with these labels."""
        assert self.welcome is not None
        capacity = self.welcome.capacity  # for this target
        if self.load is not None:
            other_targets = max(self.load.sessions - self.assigned, 0)  # their sessions
            capacity = max(self.load.capacity - other_targets, 0)
        return NodeCandidate(self.name, capacity, self.assigned, distance(labels, self.welcome.labels))

    def report(self, shadow: int) -> NodeReport:
        """Return the node's state for statistics."""
        estimates = (
            self.estimates if self.is_up else NodeEstimates()
        )  # without a connection they are outdated
        return NodeReport(
            self.name,
            self._state(shadow),
            self._reason(shadow),
            "" if self.welcome is None else self.welcome.method,
            self.assigned,
            self.breaker.trips,
            self.waits,
            self.wait_seconds,
            _ms(estimates.first_seconds),
            _ms(estimates.level_seconds),
            estimates.judged,
            estimates.acceptance,
        )

    def _reason(self, shadow: int) -> str:
        """Return why passes do not wait for the node; empty: they may."""
        judged = self.estimates.judged
        if not self.breaker.reason and judged < shadow:
            return f"{judged} of its first {shadow} drafts compared"
        return self.breaker.reason

    def _state(self, shadow: int) -> str:
        if not self.is_up:
            return "down"
        if self.is_draining:
            return "draining"
        if self.breaker.is_late:
            return "late"
        return "shadow" if self.estimates.judged < shadow else "up"


class NodeThread:
    """Keeps one node connected: connects, delivers messages to a listener, and reconnects."""

    def __init__(self, peer: NodePeer, listener: NodeListener, identity: PeerIdentity) -> None:
        self._peer = peer
        self._listener = listener
        self._identity = identity
        tls = identity.security.tls
        self._tls = None if tls is None else tls.context(is_node=False)
        self._is_closed = threading.Event()
        self._link: Connection[FromNode] | None = None
        self._connecting: socket.socket | None = None  # newest socket, before or after its handshake
        self._pinged_at = float("-inf")  # time of the last ping
        self._pings = 0  # number of pings
        self._thread = threading.Thread(target=self._run, name=f"draft-peer-{peer.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the connection, and wait up to a second for the thread."""
        self._is_closed.set()
        link, connecting = self._link, self._connecting
        if link is not None:
            link.close("the target stops")
        elif connecting is not None:
            with suppress(OSError):
                connecting.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(1.0)  # a thread that is connecting ends by itself

    def _run(self) -> None:
        """Connect again and again until closed; log each reason of a failure once."""
        pause, logged_reason = FIRST_PAUSE, ""
        while not self._is_closed.is_set():
            reason, was_up = self._run_connection()
            if self._is_closed.is_set():
                return
            pause = FIRST_PAUSE if was_up else pause
            if reason != logged_reason:
                _log.warning("draft node %s: %s; drafting continues without it", self._peer.name, reason)
            logged_reason = "" if was_up else reason
            self._is_closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _run_connection(self) -> tuple[str, bool]:
        """Connect and deliver messages until the connection ends; return why, and whether the handshake succeeded."""
        try:
            connected, welcome = self._connect()
        except (OSError, ChannelError) as error:
            self._listener.went_down(self._peer, str(error))
            return f"no connection: {error}", False
        link = self._link = Connection(connected, from_node)
        self._listener.came_up(self._peer, link, welcome)
        if self._is_closed.is_set():
            link.close("the target stops")
        _log.info("draft node %s is connected: %s", self._peer.name, welcome.method)
        reason = link.run(lambda message: self._listener.on_message(self._peer, message), self._ping)
        self._link = None
        self._listener.went_down(self._peer, reason)
        return reason, True

    def _connect(self) -> tuple[socket.socket, Welcome]:
        """Connect to the node; return the socket after the handshake, and the node's `Welcome`."""
        connected = self._connecting = self._peer.address.connect(HANDSHAKE_SECONDS)
        try:
            if self._tls is not None:
                connected = self._connecting = self._tls.wrap_socket(connected)
            return connected, greet_node(connected, self._identity)
        except BaseException:
            connected.close()
            raise

    def _ping(self) -> None:
        """Send a ping if one is due."""
        if self._link is not None and monotonic() - self._pinged_at >= PING_SECONDS:
            self._pinged_at = monotonic()
            self._pings += 1
            self._link.send(Ping(self._pings))


def _ms(seconds: float | None) -> float | None:
    """Return seconds as rounded milliseconds."""
    return None if seconds is None else round(seconds * 1e3, 3)


CHECK_SECONDS = 1.0  # seconds between two checks of the file that lists the nodes


class NodeRegistry:
    """Keeps connections to all configured nodes; if a file lists the nodes, it is read again every second."""

    def __init__(
        self,
        config: RemoteConfig,
        peers: Sequence[NodePeer],
        listener: NodeListener,
        identity: PeerIdentity,
        make_thread: Callable[[NodePeer, NodeListener, PeerIdentity], NodeThread] = NodeThread,
    ) -> None:
        """`peers` are the nodes that the configuration has now."""
        self._config = config
        self._listener = listener
        self._identity = identity
        self._make_thread = make_thread
        self._known = {peer.address: (peer, make_thread(peer, listener, identity)) for peer in peers}
        self._refused: set[NodeAddress] = set()  # addresses whose refusal was logged
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="draft-node-list", daemon=True)

    def start(self) -> None:
        for _, thread in self._known.values():
            thread.start()
        if self._config.is_listed:
            self._watcher.start()

    def close(self) -> None:
        self._is_closed.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for _, thread in self._known.values():
            thread.close()

    def check_nodes(self) -> None:
        """Read the list of nodes, then add and remove nodes; an invalid list changes nothing."""
        try:
            listed = self._config.addresses()
        except RequestError as error:
            _log.warning("%s", error)
            return
        for address in self._known.keys() - set(listed):
            peer, thread = self._known.pop(address)
            thread.close()
            self._listener.left(peer)
        for address in listed:
            if address not in self._known and self._may_join(address):
                peer = NodePeer(address)
                thread = self._make_thread(peer, self._listener, self._identity)
                self._known[address] = peer, thread
                self._listener.joined(peer)
                thread.start()

    def _may_join(self, address: NodeAddress) -> bool:
        """Return whether the connection to a node would be protected well enough; log a refusal once."""
        try:
            self._identity.security.check(address, self._config.insecure)
        except RequestError as error:
            if address not in self._refused:
                _log.warning("%s", error)
            self._refused.add(address)
            return False
        return True

    def _watch(self) -> None:
        while not self._is_closed.wait(CHECK_SECONDS):
            self.check_nodes()
