"""A request's session on its assigned node: what the node was sent, what it answered, and what is expected next."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.cluster.framing import ChannelError
from foreword.cluster.messages import Close, Commit, Guess, Open, encode_sampling
from foreword.cluster.node_registry import Peer
from foreword.cluster.waiting import UNKNOWN_SECONDS, Prospect
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask, DraftRequest

NOTHING = Draft()


@dataclass(slots=True)
class Pairing:
    """One session; after another epoch, or with another home, a request has another one."""

    session: int
    peer: Peer
    epoch: int
    vocab_size: int
    takes_trees: bool
    told: int  # tokens of the text that the node was told of
    seen: int  # tokens that it had when it was last asked for
    wants: tuple[int, int] = (0, 0)  # nodes and levels
    tree: Draft = field(default_factory=Draft)  # the newest that it has said
    number: int = 0  # of that
    is_all: bool = False  # nothing is added to it until the text grows
    is_warm: bool = False  # it has said something: its text is read
    asked_at: float | None = None  # when it was told of the first text that it has not answered yet
    asked_len: int = 0  # of that text
    level_at: float = 0.0  # when the newest level came
    given: Draft = field(default_factory=Draft)  # what was last passed on: to be compared with the text

    def opening(self, request: DraftRequest, tenant: bytes, value: float) -> Open:
        """What the node has to know first."""
        self.told = len(request.tokens)
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
        """Compare what was last guessed with the text as it is now; how much it has grown.

        That is what was passed on, or what has come since if nothing was there by then.
        """
        before, length = self.seen, len(tokens)
        if length <= before:
            return 0
        self.seen = length
        guessed, self.given = self.given, NOTHING
        if not guessed.tokens and self.tree.tokens:
            guessed = self.tree
            if guessed.committed_len != before:  # without what the node was told itself
                guessed = guessed.rebase(tokens[:before])
        self.peer.estimates.judge(guessed, tokens[before:])
        return length - before

    def commit(self, ask: Ask, now: float, value: float) -> Commit | None:
        """What the node is to hear before it guesses for this ask; None: it knows."""
        length, before, wants = len(ask.request.tokens), self.told, (ask.max_nodes, ask.max_depth)
        if length == before and wants == self.wants:
            return None
        if length > before:
            self.is_all = False
            if self.asked_at is None and self.is_warm:
                self.asked_at, self.asked_len = now, length
        self.told, self.wants = length, wants
        return Commit(self.session, length, list(ask.request.tokens[before:length]), *wants, value)

    def closing(self, tokens: Sequence[int]) -> Close:
        """The request has ended with this text."""
        if len(tokens) <= self.told:
            return Close(self.session)
        return Close(self.session, len(tokens), list(tokens[self.told :]))

    def hear(self, guess: Guess, now: float) -> bool:
        """What the node says, unless it has said something newer; whether the target knows all of its tokens.

        Raises `ChannelError` for what is no draft.
        """
        if guess.number <= self.number:
            return True
        try:
            if guess.parents:
                tree = Draft(tuple(guess.tokens), tuple(guess.parents), guess.length, self.epoch)
            else:
                tree = Draft.chain(guess.tokens, guess.length, self.epoch)
        except ValueError as error:
            raise ChannelError(f"a guess that is no draft: {error}") from None
        levels = tree.depth - self.tree.depth
        estimates, breaker = self.peer.estimates, self.peer.breaker
        if self.asked_at is not None and guess.length >= self.asked_len:
            seconds, late_after = now - self.asked_at, estimates.late_after
            self.asked_at = None
            if guess.length < self.told:  # it has not seen the newest text yet
                self.asked_at, self.asked_len = now, self.told
            estimates.first_came(seconds)
            if tree.depth > 1 and not self.tree.depth:
                estimates.level_came(0.0)  # they come at once
            in_time = late_after is None or seconds <= late_after
            if in_time and breaker.believes(seconds, estimates.first_seconds or seconds):
                breaker.in_time()
        elif levels > 0 and self.number and guess.length == self.tree.committed_len:
            estimates.level_came((now - self.level_at) / levels)
        if not self.is_warm:
            self.is_warm = True
            if not breaker.is_late:  # a text that it has read is no answer to those that it owes
                breaker.in_time()
        is_known = not tree.tokens or max(tree.tokens) < self.vocab_size
        self.tree = tree if is_known and (self.takes_trees or tree.is_chain) else self._usable(tree)
        self.number, self.level_at = guess.number, now
        is_all = guess.is_all and guess.length >= self.told
        if is_all and not self.is_all:
            estimates.filled(tree.depth, min(self.wants))
        self.is_all = is_all
        return is_known

    def _usable(self, tree: Draft) -> Draft:
        tokens, parents = tree.tokens, tree.parents
        return tree.keep(
            lambda node: tokens[node] < self.vocab_size and (self.takes_trees or parents[node] == node - 1)
        )

    def behind(self, request: DraftRequest) -> Draft:
        """What is guessed behind the request's text now."""
        if self.tree.tokens and self.tree.committed_len != len(request.tokens):
            self.tree = self.tree.rebase(request.tokens)
        return self.tree


FIRST_ANSWER = 0.05
"""Seconds after which a node is late of which nobody knows what it usually takes."""

_OVERDUE = 0.25
"""Of the usual time, what is expected to be left for what should be there already."""


Group = tuple[str, int, int, bool]
"""Node, levels at hand, levels wanted, and whether a chain goes on that has begun."""


def prospects_of(
    pairs: Sequence[tuple[Ask, Pairing | None]], now: float, shadow: int
) -> dict[Group, Prospect]:
    """What is on its way, for requests that are alike together; `shadow` as in `may_come`."""
    counts: dict[Group, int] = {}
    first: dict[Group, Pairing] = {}
    for ask, pairing in pairs:  # at every level that comes, so whoever waits for nothing is left out first
        if pairing is None or not may_come(pairing, shadow) or _late_in(pairing, now) <= 0:
            continue
        at_hand, wanted = pairing.behind(ask.request).depth, min(ask.max_depth, ask.max_nodes)
        if at_hand < wanted:
            key = (pairing.peer.name, at_hand, wanted, pairing.asked_at is None)
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, pairing)
    return {key: _prospect(first[key], key[1], key[2], count, now) for key, count in counts.items()}


def may_come(pairing: Pairing, shadow: int) -> bool:
    """Whether more is on its way that would be verified: from a node that speaks, for a text that it has read.

    A node in the shadow, whose first so many drafts are only compared, is never waited for.
    """
    if pairing.is_all or not pairing.is_warm:
        return False
    peer = pairing.peer
    return not peer.breaker.is_open and not peer.waited_in_vain and peer.estimates.judged >= shadow


def is_overdue(pairing: Pairing, now: float) -> bool:
    """Whether it owes an answer that nobody waits for any longer: it would be late."""
    return pairing.asked_at is not None and _late_in(pairing, now) < _left(pairing, now)


def _left(pairing: Pairing, now: float) -> float:
    """Seconds until the next level is expected."""
    estimates = pairing.peer.estimates
    if pairing.asked_at is None:  # the chain goes on
        usual, since = _known(estimates.level_seconds), now - pairing.level_at
    else:
        usual, since = _known(estimates.first_seconds), now - pairing.asked_at
    return max(usual - since, _OVERDUE * usual)


def _late_in(pairing: Pairing, now: float) -> float:
    """Seconds until the next level is late: from the ask on for a first one, from now on where a chain goes on."""
    late_after = pairing.peer.estimates.late_after or FIRST_ANSWER
    return late_after if pairing.asked_at is None else late_after - (now - pairing.asked_at)


def _prospect(pairing: Pairing, at_hand: int, wanted: int, requests: int, now: float) -> Prospect:
    estimates = pairing.peer.estimates
    level, survival = _known(estimates.level_seconds), estimates.survival(wanted)
    left, late_in = _left(pairing, now), _late_in(pairing, now)
    return Prospect(requests, at_hand, wanted, survival, left, level, late_in)


def _known(seconds: float | None) -> float:
    """Levels of a lookup take no time: they come at once."""
    return UNKNOWN_SECONDS if seconds is None else seconds
