"""Calls a drafter so that a failure, a hang or an invalid draft costs the draft and never the request."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from threading import current_thread, main_thread
from time import monotonic
from typing import Any, Protocol, TypeVar

from torch import Tensor

from foreword.backends.batch import Tap
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import (
    Commit,
    Drafter,
    DraftRequest,
    DraftTask,
    InFlight,
    NodeReport,
    close_all,
)
from foreword.speculation.proposing import known_tokens

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class NoAnswer(Exception):  # noqa: N818 - reads as what happened
    """A call that was not made or did not come back; `reason` is empty where that is no new fault."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Caller(Protocol):
    """Makes a drafter's calls."""

    @property
    def is_available(self) -> bool:
        """Whether a call would be made: no earlier one hangs, and the drafter does not rest after being late."""
        ...

    def call(self, work: Callable[[], _Answer]) -> _Answer:
        """Do it and return what it returns; raises what it raises, or `NoAnswer`."""
        ...

    def later(self, work: Callable[[], object]) -> None:
        """Do it when nothing hangs; no caller waits for it."""
        ...

    def close(self) -> None:
        """No call is made any more; one that hangs is abandoned."""
        ...


class InlineCaller:
    """Calls in the thread of the caller: for drafters that cannot hang, and for those that write KV pages.

    An abandoned thread would go on writing pages that belong to another request by then.
    """

    is_available = True

    def call(self, work: Callable[[], _Answer]) -> _Answer:
        return work()

    def later(self, work: Callable[[], object]) -> None:
        work()

    def close(self) -> None:
        """Nothing is kept."""


class GuardedDrafter(Drafter):
    """Calls a drafter and checks what it returns. Every fault is counted by kind; the first of each is logged."""

    def __init__(self, drafter: Drafter, name: str, caller: Caller | None = None) -> None:
        self._drafter = drafter
        self._name = name
        self._caller = caller or InlineCaller()
        self.traits = drafter.traits
        self.faults: Counter[str] = Counter()

    @property
    def absent(self) -> tuple[str, ...]:
        """Its name while it can say nothing."""
        return (self._name,) if self.traits.may_be_absent and self._drafter.absent else ()

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return the drafts as far as they can be used; an empty draft for the rest."""
        answers = self._call(lambda: list(self._drafter.propose(tasks)))
        if answers is None:
            return [Draft()] * len(tasks)
        if len(answers) != len(tasks):
            self._fault("shape", f"{len(answers)} drafts for {len(tasks)} requests")
            return [Draft()] * len(tasks)
        return [self._checked(answer, task) for answer, task in zip(answers, tasks, strict=True)]

    def observe(self, commits: Sequence[Commit]) -> None:
        self._call(lambda: self._drafter.observe(commits))

    def draft_early(self, unjudged: Sequence[InFlight], hidden: Mapping[Tap, Tensor], drawn: Tensor) -> bool:
        return bool(self._call(lambda: self._drafter.draft_early(unjudged, hidden, drawn)))

    def expect(self, request: DraftRequest) -> None:
        self._call(lambda: self._drafter.expect(request))

    def forget(self, request: DraftRequest) -> None:
        """Let the drafter drop what it keeps for a request; one that hangs does so when it comes back.

        Until then only its number is kept: an ended request must not live on for a drafter that never returns.
        """
        if self._caller.is_available:
            self._call(lambda: self._drafter.forget(request))
        else:
            bare = request.without_text()
            self._caller.later(lambda: self._drafter.forget(bare))

    def memory_bytes(self) -> int | None:
        """Return the memory that the drafter reports."""
        return self._call(self._drafter.memory_bytes)

    def fault_counts(self) -> Counter[str]:
        """By kind, under the drafter's name, with those that it counts itself."""
        own = Counter({f"{self._name}/{kind}": count for kind, count in self.faults.items()})
        return own + self._drafter.fault_counts()

    def nodes(self) -> list[NodeReport]:
        """Report the draft nodes of the drafter; any thread may call this."""
        return self._drafter.nodes()

    def close(self) -> None:
        """Close the drafter, when it comes back if it hangs, and call it no more."""
        if self._caller.is_available:
            self._call(lambda: close_all([self._drafter]))
        else:
            self._caller.later(lambda: close_all([self._drafter]))
        self._caller.close()

    def _call(self, work: Callable[[], _Answer]) -> _Answer | None:
        try:
            return self._caller.call(work)
        except NoAnswer as error:
            if error.reason:
                self._fault("timeout", error.reason)
        except BaseException as error:  # whatever a drafter raises, the request goes on
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                raise  # the user's, not the drafter's
            self._fault("exception", f"{type(error).__name__}: {error}")
        return None

    def _checked(self, answer: object, task: DraftTask) -> Draft:
        if not isinstance(answer, Draft):
            self._fault("type", f"a {type(answer).__name__} instead of a draft")
            return Draft()
        if answer.epoch == task.request.epoch:  # a late one loses what the text has passed
            answer = answer.rebase(task.request.tokens)
        nodes = len(answer)
        if nodes > task.max_nodes:
            self._fault("draft", f"{nodes} nodes where {task.max_nodes} were requested")
        elif answer.depth > task.max_depth:
            self._fault("draft", f"a depth of {answer.depth} where {task.max_depth} was requested")
        known = known_tokens(answer.within(task.max_nodes, task.max_depth), task.request)
        if len(known) < min(nodes, task.max_nodes) and answer.depth <= task.max_depth:
            size = task.request.sampling.vocab_size
            self._fault("draft", f"a token outside the vocabulary of {size}")
        return known

    def _fault(self, kind: str, message: str) -> None:
        self.faults[kind] += 1
        if self.faults[kind] == 1:
            _log.warning("drafter %s: %s; those drafts are dropped, decoding goes on", self._name, message)


REST_FACTOR = 10
"""After a call that took too long, no call is made for this many times the limit, and twice as long each time."""

LONGEST_REST = 300.0
"""Seconds after which a drafter that took too long is tried again at the latest."""


class _Call:
    """Work for the thread, and what became of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.is_done = threading.Event()
        self.answer: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.answer = self._work()
        except BaseException as error:  # it is raised where the answer is waited for
            self.error = error
        finally:
            self.is_done.set()


class CallerThread:
    """Makes one call at a time. While one hangs, no other is made; its answer is dropped when it returns.

    A drafter that keeps being late costs every request its time limit, so it is called ever less often. The thread is a
    daemon: a call that never comes back keeps no process alive.
    """

    def __init__(self, name: str, time_limit: float, clock: Callable[[], float] = monotonic) -> None:
        self._time_limit = time_limit
        self._clock = clock
        self._stuck: _Call | None = None
        self._lateness = 0  # recent late calls
        self._rests_until = float("-inf")
        self._work: SimpleQueue[_Call | None] = SimpleQueue()
        self._is_closed = False
        threading.Thread(target=_serve, args=(self._work,), name=f"drafter-{name}", daemon=True).start()

    @property
    def is_available(self) -> bool:
        """Whether a call would be made."""
        if self._stuck is not None and self._stuck.is_done.is_set():
            self._stuck = None
        return not self._is_closed and self._stuck is None and self._clock() >= self._rests_until

    def call(self, work: Callable[[], _Answer]) -> _Answer:
        """What the work returns, within the limit."""
        if not self.is_available:
            raise NoAnswer
        call = _Call(work)
        self._work.put(call)
        if not call.is_done.wait(self._time_limit):
            self._stuck = call
            self._late()
            raise NoAnswer(f"no answer within {self._time_limit:g} s")
        self._lateness = max(self._lateness - 1, 0)
        if isinstance(call.error, KeyboardInterrupt):  # Ctrl-C comes to the main thread alone: the drafter's
            raise RuntimeError("it raised KeyboardInterrupt") from call.error
        if call.error is not None:
            raise call.error
        answer: _Answer = call.answer
        return answer

    def _late(self) -> None:
        self._lateness += 1
        rest = self._time_limit * REST_FACTOR * 2 ** min(self._lateness - 1, 16)
        self._rests_until = self._clock() + min(rest, LONGEST_REST)

    def later(self, work: Callable[[], object]) -> None:
        """Do it after the call that hangs; no caller waits for it."""
        if not self._is_closed:
            self._work.put(_Call(work))

    def close(self) -> None:
        """The thread ends when it is done with what it does now."""
        self._is_closed = True
        self._work.put(None)


def _serve(work: "SimpleQueue[_Call | None]") -> None:
    while (call := work.get()) is not None:
        call.run()
        del call  # or the last one would be kept until the next comes
