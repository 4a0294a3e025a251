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
"""Seconds without messages after which a session is dropped, since its end may be lost."""

_MEMORY = 0.1  # weight of the newest value in moving averages


@dataclass(frozen=True)
class NodeLimits:
    """Limits of a node."""

    vocab_size: int
    max_len: int  # maximum text length including the draft
    capacity: int = 256  # sessions of all targets
    batch: int = 64  # sessions per round
    runs_ahead: bool = True


Target = Hashable
"""Owner of a session."""

_Asked = tuple[Target, Session, DraftTask]


class DraftService:
    """Owns the sessions of all targets and calls the drafter in rounds; used by one thread."""

    def __init__(
        self,
        drafter: Drafter,
        pace: Pace,
        limits: NodeLimits,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._drafter = drafter
        self._pace = pace
        self._limits = limits
        self._clock = clock
        self._sessions: dict[tuple[Target, int], Session] = {}
        self._numbers = count()
        self._level_seconds = 0.0
        self._busy_share = 0.0
        self._ended_at = clock()  # of the last round

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, target: Target, opened: messages.Open) -> list[tuple[Target, messages.Busy]]:
        """Add a session; a full node then drops its least valuable session, possibly this one."""
        key = (target, opened.session)
        if key in self._sessions:
            return []
        self._check(opened.tokens, opened.prediction)
        try:
            sampling = messages.decode_sampling(opened.sampling, self._limits.vocab_size)
        except ValueError as error:
            raise ChannelError(str(error)) from None
        oldest = self._clock() - FORGOTTEN_SECONDS
        for forgotten in [key for key, session in self._sessions.items() if session.heard_at < oldest]:
            self._remove(forgotten)
        session = Session(next(self._numbers), opened, sampling, self._pace, self._limits.max_len)
        session.runs_ahead, session.heard_at = self._limits.runs_ahead, self._clock()
        self._sessions[key] = session
        if len(self._sessions) <= self._limits.capacity:
            return []
        least = min(self._sessions, key=lambda one: self._sessions[one].value)
        self._remove(least)
        return [(least[0], messages.Busy(least[1], RETRY_SECONDS))]

    def commit(self, target: Target, commit: messages.SessionCommit) -> messages.Lagging | None:
        """Extend a session's text; return a reply if something was missed."""
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
        session = self._sessions.get((target, closed.session))
        if session is not None:
            self._check(closed.tokens)
            session.follow(closed.length, closed.tokens)
            self._remove((target, closed.session))

    def leave(self, target: Target) -> None:
        for key in [key for key in self._sessions if key[0] == target]:
            self._remove(key)

    def round(self) -> dict[Target, list[messages.SessionDraft]]:
        """Call the drafter once for the most urgent sessions; return drafts by target, empty if nothing is to do."""
        began = self._clock()
        drafts: dict[Target, list[messages.SessionDraft]] = {}
        wanted = [(target, session, session.next_call()) for (target, _), session in self._sessions.items()]
        chosen = self._chosen(wanted)
        if chosen:
            answers = self._drafter.propose([task for _, _, task in chosen])
            for (_, session, _), answer in zip(chosen, answers, strict=True):
                session.grow(answer)
            self._measure(began, chosen)
        silent = [(target, session) for target, session, task in wanted if task is None]
        for target, session in (*((target, session) for target, session, _ in chosen), *silent):
            if not session.is_sent:
                drafts.setdefault(target, []).append(session.to_message(session.next_call() is None))
        for target, _, _ in chosen:
            drafts.setdefault(target, [])  # there may be more to do
        return drafts

    def load(self) -> messages.NodeLoad:
        sessions = len(self._sessions)
        return messages.NodeLoad(sessions, self._limits.capacity, self._level_seconds, self._busy_share)

    def _chosen(self, wanted: Sequence[tuple[Target, Session, DraftTask | None]]) -> list[_Asked]:
        """Select sessions whose target may be waiting, then those that run ahead; ties by value."""
        tasks = [(target, session, task) for target, session, task in wanted if task is not None]
        tasks.sort(key=lambda one: (one[1].is_prefetch, -one[1].value))
        return tasks[: self._limits.batch]

    def _measure(self, began: float, chosen: Sequence[_Asked]) -> None:
        now = self._clock()
        levels = max(task.max_depth for _, _, task in chosen)
        idle = max(began - self._ended_at, 0.0)
        busy = (now - began) / max(now - began + idle, 1e-9)
        self._level_seconds += _MEMORY * ((now - began) / levels - self._level_seconds)
        self._busy_share += _MEMORY * (busy - self._busy_share)
        self._ended_at = now

    def _check(self, *texts: Sequence[int]) -> None:
        for tokens in texts:
            if tokens and max(tokens) >= self._limits.vocab_size:
                raise ChannelError(
                    f"token {max(tokens)} is outside the vocabulary of {self._limits.vocab_size}"
                )

    def _remove(self, key: tuple[Target, int]) -> None:
        session = self._sessions.pop(key)
        try:
            self._drafter.forget(session.ended())
        except Exception:  # a drafter that keeps state too long costs only memory
            _log.exception("the drafter could not forget a request")
