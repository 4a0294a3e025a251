"""A drafter that uses draft nodes: returns the drafts that have arrived, and waits for more if the wait saves time."""

from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import count
from threading import Condition
from time import monotonic

from foreword.cluster import messages
from foreword.cluster.assignment import MoveBudget, assign_node
from foreword.cluster.connection import Connection
from foreword.cluster.framing import ChannelError
from foreword.cluster.handshake import PeerIdentity
from foreword.cluster.node_registry import NodePeer, NodeRegistry
from foreword.cluster.pairing import NOTHING, Pairing, expected_arrivals, is_overdue, may_come
from foreword.cluster.security import tenant_hash
from foreword.cluster.settings import RemoteConfig, entries, parse_labels
from foreword.cluster.shared_nodes import REMOTE
from foreword.cluster.waiting import TokenRate, best_wait_seconds, longest_wait_seconds
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask, NodeReport

_Pairs = Sequence[tuple[DraftTask, Pairing | None]]
"""Draft tasks with their requests' sessions; None: the request has no node."""


class RemoteDrafter(Drafter):
    """Assigns requests to nodes, sends them committed tokens, and returns their drafts.

    The engine's thread calls the drafter's methods; each node has a thread that receives its messages. If a node fails,
    its drafts are missing, and at most one pass waits for it without effect.
    """

    traits = REMOTE

    def __init__(
        self, config: RemoteConfig, identity: PeerIdentity, clock: Callable[[], float] = monotonic
    ) -> None:
        self._config = config
        self._identity = identity
        self._clock = clock
        self._labels = parse_labels(config.labels)
        self._local_tenants = entries(config.local_tenants)
        self._arrived = Condition()  # guards all fields below and the peers; notified when drafts arrive
        self._peers = [NodePeer(address) for address in config.addresses()]
        self._pairings: dict[int, Pairing] = {}  # by request id
        self._sessions: dict[int, Pairing] = {}  # by session number
        self._moving: set[int] = set()  # ids of requests that lost their node
        self._numbers = count()  # session numbers
        self._rate = TokenRate()
        self._moves = MoveBudget(clock())
        self.faults: Counter[str] = Counter()  # by kind, such as "late"
        self._registry = NodeRegistry(config, self._peers, self, identity)

    def start(self) -> "RemoteDrafter":
        """Start the threads that connect to the nodes; return this drafter."""
        self._identity.vocabulary.digest()  # computed before the first handshake
        self._registry.start()
        return self

    @property
    def absent(self) -> tuple[str, ...]:
        """The name "remote" while no node's drafts are used: other drafts are not counted for it."""
        is_used = any(peer.is_used(self._config.shadow) for peer in self._peers)
        return () if is_used else ("remote",)

    def expect(self, request: DraftRequest) -> None:
        """Open a session for a waiting request, so that its node processes the prompt early."""
        with self._arrived:
            self._pairing_of(request, self._clock())

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Send the nodes the new tokens of all requests; return the drafts that have arrived, possibly after a wait."""
        with self._arrived:
            now = self._clock()
            pairs = [(task, self._pairing_of(task.request, now)) for task in tasks]
            self._send_commits(pairs, now)
            self._wait(pairs)
            return [NOTHING if pairing is None else self._draft(task, pairing) for task, pairing in pairs]

    def forget(self, request: DraftRequest) -> None:
        with self._arrived:
            pairing = self._pairings.get(request.request_id)
            if pairing is not None:
                pairing.peer.send(pairing.closing(request.tokens))
                self._end_pairing(request.request_id)
            self._moving.discard(request.request_id)

    def close(self) -> None:
        self._registry.close()

    def nodes(self) -> list[NodeReport]:
        with self._arrived:
            return [peer.report(self._config.shadow) for peer in self._peers]

    def fault_counts(self) -> Counter[str]:
        """Return counts of lost and late nodes."""
        with self._arrived:
            return Counter({f"remote/{kind}": times for kind, times in self.faults.items()})

    def joined(self, peer: NodePeer) -> None:
        with self._arrived:
            self._peers = [*self._peers, peer]

    def left(self, peer: NodePeer) -> None:
        self.went_down(peer, "taken off the list")
        with self._arrived:
            self._peers = [other for other in self._peers if other is not peer]

    def came_up(self, peer: NodePeer, link: Connection[messages.FromNode], welcome: messages.Welcome) -> None:
        with self._arrived:
            peer.begin(link, welcome)

    def went_down(self, peer: NodePeer, reason: str) -> None:
        with self._arrived:
            self.faults["lost"] += peer.is_up
            peer.end(reason)
            lost = [request_id for request_id, pairing in self._pairings.items() if pairing.peer is peer]
            for request_id in lost:
                self._end_pairing(request_id)
                self._moving.add(request_id)
            self._arrived.notify_all()

    def on_message(self, peer: NodePeer, message: messages.FromNode) -> None:
        """Handle a node's message; raise `ChannelError` for an invalid one, which ends the connection."""
        with self._arrived:
            if isinstance(message, messages.SessionDrafts):
                self._take_drafts(peer, message)
            elif isinstance(message, messages.Lagging):
                self._note_lagging(peer, message)
            elif isinstance(message, messages.Busy):
                self._busy(peer, message)
            elif isinstance(message, messages.NodeLoad):
                peer.load = message
            elif isinstance(message, messages.NodeDrain):
                peer.is_draining = True
            elif not isinstance(message, messages.Pong):
                raise ChannelError(f"a {type(message).__name__} after the handshake")

    def _take_drafts(self, peer: NodePeer, message: messages.SessionDrafts) -> None:
        """Store the drafts of a node and wake a waiting pass; drafts of ended sessions are ignored."""
        now = self._clock()
        for draft in message.drafts:
            pairing = self._sessions.get(draft.session)
            if pairing is not None and pairing.peer is peer and not pairing.receive(draft, now):
                self.faults["unknown token"] += 1
        peer.has_timed_out = False
        self._arrived.notify_all()

    def _note_lagging(self, peer: NodePeer, message: messages.Lagging) -> None:
        """Record which tokens the node lacks, so that the next draft request sends them."""
        pairing = self._sessions.get(message.session)
        if pairing is not None and pairing.peer is peer:
            pairing.sent, pairing.wants = min(pairing.sent, message.length), (0, 0)

    def _busy(self, peer: NodePeer, message: messages.Busy) -> None:
        """End a session that a full node has dropped; the request moves to another node."""
        peer.busy_until = self._clock() + message.retry_seconds
        self.faults["busy"] += 1
        for request_id, pairing in self._pairings.items():
            if pairing.session == message.session and pairing.peer is peer:
                self._end_pairing(request_id)
                self._moving.add(request_id)
                return

    def _pairing_of(self, request: DraftRequest, now: float) -> Pairing | None:
        """Return the request's session, opened or moved to another node if necessary; None: no node takes it."""
        number = request.request_id
        pairing = self._pairings.get(number)
        if pairing is not None and pairing.epoch == request.epoch and not pairing.peer.is_draining:
            return pairing
        if any(fnmatchcase(request.tenant, pattern) for pattern in self._local_tenants):
            return None
        is_moving = number in self._moving or (pairing is not None and pairing.peer.is_draining)
        if is_moving and not self._moves.take(now, len(self._pairings)):
            return pairing  # too many requests have moved; a later call moves this one
        if pairing is not None:
            pairing.peer.send(pairing.closing(()))
            self._end_pairing(number)
        return self._pair(request, now)

    def _pair(self, request: DraftRequest, now: float) -> Pairing | None:
        """Open a session for the request on a node; return None if no node is free."""
        candidates = [peer.candidate(self._labels) for peer in self._peers if peer.takes(now)]
        name = assign_node(request.request_id, candidates)
        if name is None:
            return None
        peer = next(peer for peer in self._peers if peer.name == name)
        length, sampling = len(request.tokens), request.sampling
        pairing = Pairing(
            next(self._numbers),
            peer,
            request.epoch,
            sampling.vocab_size,
            takes_trees=sampling.rule.takes_trees,
            sent=length,
            text_len=length,
        )
        self._send_opening(pairing, request)
        peer.assigned += 1
        self._pairings[request.request_id] = self._sessions[pairing.session] = pairing
        self._moving.discard(request.request_id)
        return pairing

    def _send_opening(self, pairing: Pairing, request: DraftRequest) -> None:
        """Send the request's whole text and sampling parameters."""
        tenant = tenant_hash(request.tenant, self._identity.security.token)
        pairing.peer.send(pairing.opening(request, tenant, self._token_seconds))

    def _end_pairing(self, request_id: int) -> None:
        """Remove the session of a request, without a message to its node."""
        pairing = self._pairings.pop(request_id)
        pairing.is_all = True  # no pass waits for the draft
        del self._sessions[pairing.session]
        if pairing.peer.assigned:  # a lost node has 0 already
            pairing.peer.assigned -= 1

    @property
    def _token_seconds(self) -> float:
        """Seconds in which this target generates one token; 0: unknown."""
        rate = self._rate.per_second
        return 0.0 if not rate else 1 / rate

    def _send_commits(self, pairs: _Pairs, now: float) -> None:
        """Compare drafts with the new tokens; send each node its requests' new tokens and draft sizes in one frame."""
        new_tokens, value = 0, self._token_seconds
        by_peer: dict[str, tuple[NodePeer, list[messages.SessionCommit]]] = {}
        for task, pairing in pairs:
            if pairing is None:
                continue
            new_tokens += pairing.read(task.request.tokens)
            if pairing.requested_at is not None:
                self._note_late(pairing, now)
            if not pairing.sent:  # the node lacks the whole text
                self._send_opening(pairing, task.request)
            commit = pairing.commit(task, now, value)
            if commit is not None:
                by_peer.setdefault(pairing.peer.name, (pairing.peer, []))[1].append(commit)
        self._rate.record(new_tokens, now)
        for peer, commits in by_peer.values():
            peer.send(messages.Commits(commits))

    def _wait(self, pairs: _Pairs) -> None:
        """Wait while the expected gain of levels in flight exceeds the cost of the wait."""
        rate = self._rate.per_second
        if rate is None:
            return
        began = now = self._clock()
        deadline: float | None = None
        awaited: set[str] = set()  # names of nodes
        while True:
            arrivals = expected_arrivals(pairs, now, self._config.shadow)
            seconds = best_wait_seconds(list(arrivals.values()), rate)
            if seconds <= 0:
                break
            if deadline is None:
                deadline = began + longest_wait_seconds(list(arrivals.values()), rate)
            if now >= deadline:
                self._note_timeouts(pairs, now)
                break
            awaited |= {node for node, *_ in arrivals}
            self._arrived.wait(min(seconds, deadline - now))
            now = self._clock()
        if not awaited:
            return
        for _, pairing in pairs:
            if pairing is not None and is_overdue(pairing, now):
                self._note_late(pairing, now, after=0.0)
        for peer in self._peers:
            if peer.name in awaited:
                peer.waits += 1
                peer.wait_seconds += now - began

    def _note_timeouts(self, pairs: _Pairs, now: float) -> None:
        """Record that a wait ended without all levels: no pass waits for their nodes until these send a draft."""
        for _, pairing in pairs:
            if pairing is not None and may_come(pairing, self._config.shadow):
                self._note_late(pairing, now, after=0.0)
                pairing.peer.has_timed_out = True

    def _note_late(self, pairing: Pairing, now: float, after: float | None = None) -> None:
        """Record a late draft if its text was sent at least `after` seconds ago; None: the node's limit."""
        peer = pairing.peer
        if pairing.requested_at is None or peer.breaker.is_open:
            return
        waited = now - pairing.requested_at
        limit = peer.estimates.late_after if after is None else after
        if limit is not None and waited >= limit:
            peer.breaker.record_late(waited)
            self.faults["late"] += 1

    def _draft(self, task: DraftTask, pairing: Pairing) -> Draft:
        """Return the draft that has arrived for a task; empty while a new node's drafts are only compared."""
        draft = pairing.draft_after(task.request)
        if not draft.tokens:
            return NOTHING
        draft = pairing.returned = draft.within(task.max_nodes, task.max_depth)
        return draft if pairing.peer.estimates.judged >= self._config.shadow else NOTHING
