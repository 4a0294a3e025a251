"""Selects the sessions that a node drafts for, and calls its drafter."""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter

from foreword.cluster import messages
from foreword.cluster.framing import ChannelError
from foreword.cluster.node_session import Pace, Session
from foreword.speculation.drafting import Drafter, DraftTask

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # seconds after which a target may retry a full node

FORGOTTEN_SECONDS = 300.0
"""Seconds without messages after which a session is dropped: the message that ends it may be lost."""

_NEWEST_WEIGHT = 0.1  # weight of the newest value in moving averages


@dataclass(frozen=True)
class NodeLimits:
    """Limits of a node."""

    vocab_size: int
    max_len: int  # maximum text length including the draft
    capacity: int = 256  # maximum number of sessions, of all targets
    batch: int = 64  # maximum number of sessions per round
    runs_ahead: bool = True  # whether the node drafts more levels than requested


Target = Hashable  # identifies the target that owns a session
_SessionTask = tuple[Target, Session, DraftTask]  # a drafter call for a session of a target


class DraftService:
    """Owns the sessions of all targets and calls the drafter in rounds; used by one thread."""

    def __init__(
        self, drafter: Drafter, pace: Pace, limits: NodeLimits, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._drafter = drafter
        self._pace = pace
        self._limits = limits
        self._clock = clock
        self._sessions: dict[tuple[Target, int], Session] = {}  # by target and its session number
        self._numbers = count()  # request ids for the drafter
        self._level_seconds = 0.0  # mean drafting time per level
        self._busy_share = 0.0  # fraction of the time in which the drafter works
        self._ended_at = clock()  # end of the last round

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, target: Target, opened: messages.Open) -> list[tuple[Target, messages.Busy]]:
        """Add a session. If the node is full, drop the least valuable session, and return its target and a message.

        Sessions without recent messages are dropped first. Raise `ChannelError` for invalid tokens or parameters.
        """
        key = (target, opened.session)
        if key in self._sessions:
            return []
        self._check(opened.tokens, opened.prediction)
        try:
            sampling = messages.decode_sampling(opened.sampling, self._limits.vocab_size)
        except ValueError as error:
            raise ChannelError(str(error)) from None
        oldest = self._clock() - FORGOTTEN_SECONDS
        for silent in [key for key, session in self._sessions.items() if session.heard_at < oldest]:
            self._remove(silent)
        session = Session(next(self._numbers), opened, sampling, self._pace, self._limits.max_len)
        session.runs_ahead, session.heard_at = self._limits.runs_ahead, self._clock()
        self._sessions[key] = session
        if len(self._sessions) <= self._limits.capacity:
            return []
        least_valuable = min(self._sessions, key=lambda key: self._sessions[key].value)
        self._remove(least_valuable)
        target, number = least_valuable
        return [(target, messages.Busy(number, RETRY_SECONDS))]

    def commit(self, target: Target, commit: messages.SessionCommit) -> messages.Lagging | None:
        """Extend a session's text and set its draft size; return the reply if part of the text is missing."""
        session = self._sessions.get((target, commit.session))
        if session is None:
            return messages.Lagging(commit.session, 0)
        self._check(commit.tokens)
        if not session.follow(commit.length, commit.tokens):
            return messages.Lagging(commit.session, session.committed)
        session.want(commit.nodes, commit.depth, commit.value)
        session.heard_at = self._clock()
        return None

    def close(self, target: Target, closed: messages.Close) -> None:
        """End a session with its whole text, which the drafter may index."""
        session = self._sessions.get((target, closed.session))
        if session is not None:
            self._check(closed.tokens)
            session.follow(closed.length, closed.tokens)
            self._remove((target, closed.session))

    def leave(self, target: Target) -> None:
        """End all sessions of a target that has disconnected."""
        for key in [key for key in self._sessions if key[0] == target]:
            self._remove(key)

    def round(self) -> dict[Target, list[messages.SessionDraft]]:
        """Call the drafter once for the most urgent sessions; return the drafts to send, by target.

        The result is empty if no session needs a call. A target may have no drafts to send.
        """
        began = self._clock()
        drafts: dict[Target, list[messages.SessionDraft]] = {}
        wanted = [(target, session, session.next_call()) for (target, _), session in self._sessions.items()]
        chosen = self._chosen(wanted)
        if chosen:
            answers = self._drafter.propose([task for _, _, task in chosen])
            for (_, session, _), answer in zip(chosen, answers, strict=True):
                session.grow(answer)
            self._measure(began, chosen)
        called = [(target, session) for target, session, _ in chosen]
        complete = [(target, session) for target, session, task in wanted if task is None]
        for target, session in (*called, *complete):
            if not session.is_sent:
                is_complete = session.next_call() is None
                drafts.setdefault(target, []).append(session.to_message(is_complete))
        for target, _, _ in chosen:
            drafts.setdefault(target, [])  # these sessions may need further calls
        return drafts

    def load(self) -> messages.NodeLoad:
        """Return the load report of the node."""
        sessions = len(self._sessions)
        return messages.NodeLoad(sessions, self._limits.capacity, self._level_seconds, self._busy_share)

    def _chosen(self, wanted: Sequence[tuple[Target, Session, DraftTask | None]]) -> list[_SessionTask]:
        """Return the most urgent calls: those that targets may wait for, then those with the most valuable tokens."""
        tasks = [(target, session, task) for target, session, task in wanted if task is not None]
        tasks.sort(key=lambda call: (call[1].is_prefetch, -call[1].value))
        return tasks[: self._limits.batch]

    def _measure(self, began: float, chosen: Sequence[_SessionTask]) -> None:
        """Update the node's load after a round of these calls, which began at this time."""
        now = self._clock()
        levels = max(task.max_depth for _, _, task in chosen)
        seconds, idle_seconds = now - began, max(began - self._ended_at, 0.0)
        busy_share = seconds / max(seconds + idle_seconds, 1e-9)
        self._level_seconds += _NEWEST_WEIGHT * (seconds / levels - self._level_seconds)
        self._busy_share += _NEWEST_WEIGHT * (busy_share - self._busy_share)
        self._ended_at = now

    def _check(self, *texts: Sequence[int]) -> None:
        """Raise `ChannelError` for a token outside the vocabulary."""
        for tokens in texts:
            if tokens and max(tokens) >= self._limits.vocab_size:
                raise ChannelError(
                    f"token {max(tokens)} is outside the vocabulary of {self._limits.vocab_size}"
                )

    def _remove(self, key: tuple[Target, int]) -> None:
        """Remove a session and let the drafter forget it."""
        session = self._sessions.pop(key)
        try:
            self._drafter.forget(session.ended())
        except Exception:  # the drafter keeps the request's state, which costs only memory
            _log.exception("the drafter could not forget a request")
