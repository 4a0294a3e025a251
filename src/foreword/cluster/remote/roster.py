"""The threads that keep the connections to nodes; the nodes of a file come and go as it says."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from foreword.cluster.address import NodeAddress
from foreword.cluster.handshake import Identity
from foreword.cluster.remote.peer import Hub, Peer, PeerThread
from foreword.cluster.settings import RemoteConfig
from foreword.errors import RequestError

_log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks at the file."""


class _Hub(Hub, Protocol):
    def joined(self, peer: Peer) -> None:
        """There is one more node; nothing was heard of it yet."""
        ...

    def left(self, peer: Peer) -> None:
        """It is not to be used any more."""
        ...


class Roster:
    """Connects to the nodes that there are, as long as they are listed."""

    def __init__(
        self,
        config: RemoteConfig,
        peers: Sequence[Peer],
        hub: _Hub,
        identity: Identity,
        thread: Callable[[Peer, Hub, Identity], PeerThread] = PeerThread,
    ) -> None:
        self._config = config
        self._hub = hub
        self._identity = identity
        self._thread = thread
        self._known = {peer.address: (peer, thread(peer, hub, identity)) for peer in peers}
        self._refused: set[NodeAddress] = set()
        self._is_closed = threading.Event()
        self._looking = threading.Thread(target=self._run, name="draft-roster", daemon=True)

    def start(self) -> None:
        for _, thread in self._known.values():
            thread.start()
        if self._config.is_listed:
            self._looking.start()

    def close(self) -> None:
        self._is_closed.set()
        if self._looking.is_alive():
            self._looking.join()
        for _, thread in self._known.values():
            thread.close()

    def look(self) -> None:
        """Read the file; one that cannot be read, or has something else in it, changes nothing."""
        try:
            listed = self._config.addresses()
        except RequestError as error:
            _log.warning("%s", error)
            return
        for address in self._known.keys() - set(listed):
            peer, thread = self._known.pop(address)
            thread.close()
            self._hub.left(peer)
        for address in listed:
            if address not in self._known and self._may_join(address):
                peer = Peer(address)
                thread = self._thread(peer, self._hub, self._identity)
                self._known[address] = peer, thread
                self._hub.joined(peer)
                thread.start()

    def _may_join(self, address: NodeAddress) -> bool:
        try:
            self._identity.security.check(address, self._config.insecure)
        except RequestError as error:
            if address not in self._refused:
                _log.warning("%s", error)
            self._refused.add(address)
            return False
        return True

    def _run(self) -> None:
        while not self._is_closed.wait(LOOK_SECONDS):
            self.look()
