"""A request's session on its assigned node: sent tokens, received draft, and expected draft levels."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.cluster.framing import ChannelError
from foreword.cluster.messages import Close, Open, SessionCommit, SessionDraft, encode_sampling
from foreword.cluster.node_registry import NodePeer
from foreword.cluster.waiting import UNKNOWN_SECONDS, ExpectedArrival
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftRequest, DraftTask

NOTHING = Draft()  # the empty draft


@dataclass(slots=True)
class Pairing:
    """The session of a request on its node. A new epoch of the request, or another node, starts a new session."""

    session: int  # number of the session
    peer: NodePeer
    epoch: int  # epoch of the request
    vocab_size: int
    takes_trees: bool  # whether the request's acceptance rule allows trees
    sent: int  # number of tokens sent to the node
    text_len: int  # text length at the last draft request
    wants: tuple[int, int] = (0, 0)  # requested draft nodes and levels
    tree: Draft = field(default_factory=Draft)  # newest received draft
    number: int = 0  # number of the newest received draft
    is_all: bool = False  # whether the newest received draft is complete until the text grows
    is_warm: bool = False  # whether the node has sent a draft, so that it has processed the text
    requested_at: float | None = (
        None  # time at which the first unanswered text was sent; None: all are answered
    )
    requested_len: int = 0  # length of the first unanswered text
    level_at: float = 0.0  # arrival time of the newest level
    returned: Draft = field(default_factory=Draft)  # draft that the engine has received last

    def opening(self, request: DraftRequest, tenant: bytes, value: float) -> Open:
        """Return the message that opens the session with the whole text, and record the text as sent."""
        self.sent = len(request.tokens)
        return Open(
            self.session,
            request.tokens[:],  # type: ignore[arg-type]
            request.prompt_len,
            encode_sampling(request.sampling),
            tenant,
            value,
            list(request.prediction),
        )

    def read(self, tokens: Sequence[int]) -> int:
        """Compare the last draft with the current text; return the number of new tokens.

        The last draft is the one that the engine received or, without one, a draft that arrived too late for it.
        """
        before, length = self.text_len, len(tokens)
        if length <= before:
            return 0
        self.text_len = length
        last, self.returned = self.returned, NOTHING
        if not last.tokens and self.tree.tokens:
            last = self.tree
            if last.committed_len != before:  # drop draft tokens that were committed meanwhile
                last = last.rebase(tokens[:before])
        self.peer.estimates.judge(last, tokens[before:])
        return length - before

    def commit(self, task: DraftTask, now: float, value: float) -> SessionCommit | None:
        """Return the commit to send to the node, and record it as sent; None: neither text nor draft size are new."""
        length, before, wants = len(task.request.tokens), self.sent, (task.max_nodes, task.max_depth)
        if length == before and wants == self.wants:
            return None
        if length > before:
            self.is_all = False
            if self.requested_at is None and self.is_warm:
                self.requested_at, self.requested_len = now, length
        self.sent, self.wants = length, wants
        return SessionCommit(self.session, length, list(task.request.tokens[before:length]), *wants, value)

    def closing(self, tokens: Sequence[int]) -> Close:
        """Return the message that ends the session with this text."""
        if len(tokens) <= self.sent:
            return Close(self.session)
        return Close(self.session, len(tokens), list(tokens[self.sent :]))

    def receive(self, draft: SessionDraft, now: float) -> bool:
        """Store a new draft; return whether all its tokens are valid. Raise `ChannelError` if it is no tree.

        Its arrival time updates the node's estimates and circuit breaker.
        """
        if draft.number <= self.number:
            return True
        try:
            if draft.parents:
                tree = Draft(tuple(draft.tokens), tuple(draft.parents), draft.length, self.epoch)
            else:
                tree = Draft.chain(draft.tokens, draft.length, self.epoch)
        except ValueError as error:
            raise ChannelError(f"a draft that is invalid: {error}") from None
        levels = tree.depth - self.tree.depth
        estimates, breaker = self.peer.estimates, self.peer.breaker
        if self.requested_at is not None and draft.length >= self.requested_len:
            seconds, late_after = now - self.requested_at, estimates.late_after
            self.requested_at = None
            if draft.length < self.sent:  # the draft follows an older text: the newest is unanswered
                self.requested_at, self.requested_len = now, self.sent
            estimates.record_first(seconds)
            if tree.depth > 1 and not self.tree.depth:
                estimates.record_level(0.0)  # several levels have arrived together
            is_in_time = late_after is None or seconds <= late_after
            if is_in_time and breaker.is_timely(seconds, estimates.first_seconds or seconds):
                breaker.record_timely()
        elif levels > 0 and self.number and draft.length == self.tree.committed_len:
            estimates.record_level((now - self.level_at) / levels)
        if not self.is_warm:
            self.is_warm = True
            if not breaker.is_late:  # a node that was late must first answer a request in time
                breaker.record_timely()
        is_valid = not tree.tokens or max(tree.tokens) < self.vocab_size
        self.tree = tree if is_valid and (self.takes_trees or tree.is_chain) else self._usable_part(tree)
        self.number, self.level_at = draft.number, now
        is_all = draft.is_all and draft.length >= self.sent
        if is_all and not self.is_all:
            estimates.record_depth(tree.depth, min(self.wants))
        self.is_all = is_all
        return is_valid

    def _usable_part(self, tree: Draft) -> Draft:
        """Return the nodes with valid tokens; of a tree only its first chain if the rule allows no trees."""

        def is_usable(node: int) -> bool:
            # In a chain, every node's parent is the one before it.
            is_in_chain = self.takes_trees or tree.parents[node] == node - 1
            return is_in_chain and tree.tokens[node] < self.vocab_size

        return tree.keep(is_usable)

    def draft_after(self, request: DraftRequest) -> Draft:
        """Return the part of the newest draft that follows the request's text, and drop the rest."""
        if self.tree.tokens and self.tree.committed_len != len(request.tokens):
            self.tree = self.tree.rebase(request.tokens)
        return self.tree


FIRST_ANSWER = 0.05  # seconds after which a node without measurements is late
_OVERDUE = 0.25  # expected remaining time of an overdue level, as a fraction of the usual time


Group = tuple[str, int, int, bool]
"""Requests with equal progress: (node, arrived levels, wanted levels, whether the newest text has an answer)."""


def expected_arrivals(
    pairs: Sequence[tuple[DraftTask, Pairing | None]], now: float, shadow: int
) -> dict[Group, ExpectedArrival]:
    """Return the draft levels in flight for which passes may wait, by group; `shadow` as in `may_come`."""
    groups: dict[Group, list[Pairing]] = {}
    # This runs for every arriving level, so requests without an expected draft are skipped first.
    for task, pairing in pairs:
        if pairing is None or not may_come(pairing, shadow) or _late_in(pairing, now) <= 0:
            continue
        at_hand, wanted = pairing.draft_after(task.request).depth, min(task.max_depth, task.max_nodes)
        if at_hand < wanted:
            group = (pairing.peer.name, at_hand, wanted, pairing.requested_at is None)
            groups.setdefault(group, []).append(pairing)
    return {group: _expected_arrival(group, pairings, now) for group, pairings in groups.items()}


def may_come(pairing: Pairing, shadow: int) -> bool:
    """Return whether passes may wait for levels in flight: more will arrive, and they would be verified.

    The first `shadow` drafts of a node are only compared with the text, so no pass waits for them.
    """
    if pairing.is_all or not pairing.is_warm:
        return False
    peer = pairing.peer
    return not peer.breaker.is_open and not peer.has_timed_out and peer.estimates.judged >= shadow


def is_overdue(pairing: Pairing, now: float) -> bool:
    """Return whether a first level is expected only after it is late, so that passes no longer wait for it."""
    return pairing.requested_at is not None and _late_in(pairing, now) < _left(pairing, now)


def _left(pairing: Pairing, now: float) -> float:
    """Return the seconds until the next level is expected."""
    estimates = pairing.peer.estimates
    if pairing.requested_at is None:  # the next level continues the draft
        usual, passed = _or_default(estimates.level_seconds), now - pairing.level_at
    else:
        usual, passed = _or_default(estimates.first_seconds), now - pairing.requested_at
    return max(usual - passed, _OVERDUE * usual)


def _late_in(pairing: Pairing, now: float) -> float:
    """Return the seconds until the next level is late. The time for a first level runs since the text was sent."""
    late_after = pairing.peer.estimates.late_after or FIRST_ANSWER
    return late_after if pairing.requested_at is None else late_after - (now - pairing.requested_at)


def _expected_arrival(group: Group, pairings: Sequence[Pairing], now: float) -> ExpectedArrival:
    """Return when the missing levels of a group's requests are expected; the first request stands for all."""
    first = pairings[0]
    _, at_hand, wanted, _ = group
    estimates = first.peer.estimates
    level_seconds, survival = _or_default(estimates.level_seconds), estimates.survival(wanted)
    left, late_in = _left(first, now), _late_in(first, now)
    return ExpectedArrival(len(pairings), at_hand, wanted, survival, left, level_seconds, late_in)


def _or_default(seconds: float | None) -> float:
    """Return the measured seconds, or those assumed before the first measurement."""
    return UNKNOWN_SECONDS if seconds is None else seconds
