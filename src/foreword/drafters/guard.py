"""Calls drafters so that a failure, a hang or an invalid draft costs only the draft."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import current_thread, main_thread
from time import monotonic
from typing import Any, TypeVar

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
from foreword.speculation.proposing import without_unknown_tokens

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_Work = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
"""Calls and their future results; None ends the thread."""


class NoAnswer(Exception):  # noqa: N818 - names the event
    """A call was not made, or did not return in time. `reason` is empty if this fault has been counted already."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class InlineCaller:
    """Makes calls in the caller's thread, for drafters that cannot hang or that write KV pages.

    A hanging call that writes KV pages must not be abandoned: the pages could belong to another request by then.
    """

    @property
    def is_available(self) -> bool:
        """Whether `call` would run its work now: no earlier call hangs, and the drafter is not paused."""
        return True

    def call(self, work: Callable[[], _Answer]) -> _Answer:
        """Run `work` and return its result; raise its exception, or `NoAnswer`."""
        return work()

    def later(self, work: Callable[[], object]) -> None:
        """Run `work` after all earlier calls, without waiting for its end; here, immediately."""
        work()

    def close(self) -> None:
        """Make no more calls, and abandon a hanging call."""


class GuardedDrafter(Drafter):
    """Calls a drafter and checks its results. Faults are counted by kind, and the first one of each kind is logged."""

    def __init__(self, drafter: Drafter, name: str, caller: InlineCaller | None = None) -> None:
        self._drafter = drafter
        self._name = name
        self._caller = caller or InlineCaller()
        self.traits = drafter.traits
        self.faults: Counter[str] = Counter()

    @property
    def absent(self) -> tuple[str, ...]:
        """The drafter's name while it cannot be called."""
        return (self._name,) if self.traits.may_be_absent and self._drafter.absent else ()

    @property
    def is_ready(self) -> bool:
        return self._drafter.is_ready

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return the valid drafts; empty drafts instead of invalid ones."""
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
        """Notify the drafter of a request's end, now or when a hanging call returns.

        Until then only a copy without the text is stored, so that a hanging drafter keeps no ended request alive.
        """
        if self._caller.is_available:
            self._call(lambda: self._drafter.forget(request))
        else:
            bare = request.without_text()
            self._caller.later(lambda: self._drafter.forget(bare))

    def memory_bytes(self) -> int | None:
        return self._call(self._drafter.memory_bytes)

    def fault_counts(self) -> Counter[str]:
        counts = Counter({f"{self._name}/{kind}": count for kind, count in self.faults.items()})
        return counts + self._drafter.fault_counts()

    def nodes(self) -> list[NodeReport]:
        return self._drafter.nodes()

    def close(self) -> None:
        """Close the drafter, now or when a hanging call returns, and make no more calls."""
        if self._caller.is_available:
            self._call(lambda: close_all([self._drafter]))
        else:
            self._caller.later(lambda: close_all([self._drafter]))
        self._caller.close()

    def _call(self, work: Callable[[], _Answer]) -> _Answer | None:
        """Return the result of `work`; None after a fault, which is counted."""
        try:
            return self._caller.call(work)
        except NoAnswer as error:
            if error.reason:
                self._fault("timeout", error.reason)
        except BaseException as error:  # a drafter must not fail a request
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                raise  # Ctrl-C
            self._fault("exception", f"{type(error).__name__}: {error}")
        return None

    def _checked(self, answer: object, task: DraftTask) -> Draft:
        """Return the valid part of a draft; count a fault if anything had to be dropped."""
        if not isinstance(answer, Draft):
            self._fault("type", f"a {type(answer).__name__} instead of a draft")
            return Draft()
        if answer.epoch == task.request.epoch:  # drop draft tokens that are committed by now
            answer = answer.rebase(task.request.tokens)
        nodes = len(answer)
        if nodes > task.max_nodes:
            self._fault("draft", f"{nodes} nodes, and at most {task.max_nodes} were requested")
        elif answer.depth > task.max_depth:
            self._fault("draft", f"a depth of {answer.depth}, and at most {task.max_depth} was requested")
        valid = without_unknown_tokens(answer.within(task.max_nodes, task.max_depth), task.request)
        if len(valid) < min(nodes, task.max_nodes) and answer.depth <= task.max_depth:
            size = task.request.sampling.vocab_size
            self._fault("draft", f"a token outside the vocabulary of {size}")
        return valid

    def _fault(self, kind: str, message: str) -> None:
        self.faults[kind] += 1
        if self.faults[kind] == 1:
            _log.warning("drafter %s: %s; those drafts are dropped, decoding goes on", self._name, message)


PAUSE_FACTOR = 10  # pause after the first late call, as a multiple of the time limit
MAX_PAUSE = 300.0  # maximum pause, in seconds


class CallerThread(InlineCaller):
    """Makes one call at a time in a thread.

    While a call hangs, no other call is made, and its late result is dropped. Every late call delays all requests by
    the time limit. Therefore each late call is followed by a pause, which doubles with every further late call. The
    thread is a daemon, so that a hanging call does not keep the process alive.
    """

    def __init__(self, name: str, time_limit: float, clock: Callable[[], float] = monotonic) -> None:
        self._time_limit = time_limit
        self._clock = clock
        self._hanging: Future[Any] | None = None  # the future result of a hanging call
        self._late_calls = 0  # late calls minus calls in time, at least 0
        self._paused_until = float("-inf")  # on `clock`, in seconds
        self._work: _Work = SimpleQueue()
        self._is_closed = False
        threading.Thread(target=_serve, args=(self._work,), name=f"drafter-{name}", daemon=True).start()

    @property
    def is_available(self) -> bool:
        """Whether a call would be made now."""
        if self._hanging is not None and self._hanging.done():
            self._hanging = None
        return not self._is_closed and self._hanging is None and self._clock() >= self._paused_until

    def call(self, work: Callable[[], _Answer]) -> _Answer:
        """Return the result of `work`; raise its exception, or `NoAnswer` after the time limit."""
        if not self.is_available:
            raise NoAnswer
        answer: Future[_Answer] = Future()
        self._work.put((answer, work))
        try:
            error = answer.exception(self._time_limit)
        except TimeoutError:
            self._hanging = answer
            self._pause()
            raise NoAnswer(f"no answer within {self._time_limit:g} s") from None
        self._late_calls = max(self._late_calls - 1, 0)
        if isinstance(error, KeyboardInterrupt):  # raised by the drafter: Ctrl-C reaches only the main thread
            raise RuntimeError("it raised KeyboardInterrupt") from error
        return answer.result()

    def _pause(self) -> None:
        """Make no calls for a while after a late one."""
        self._late_calls += 1
        pause = self._time_limit * PAUSE_FACTOR * 2 ** min(self._late_calls - 1, 16)
        self._paused_until = self._clock() + min(pause, MAX_PAUSE)

    def later(self, work: Callable[[], object]) -> None:
        """Run `work` after the calls before it, without waiting for it."""
        if not self._is_closed:
            self._work.put((Future(), work))

    def close(self) -> None:
        """End the thread after its current call."""
        self._is_closed = True
        self._work.put(None)


def _serve(queue: _Work) -> None:
    """Run the calls of a queue until None."""
    while (item := queue.get()) is not None:
        answer, work = item
        try:
            answer.set_result(work())
        except BaseException as error:  # raised again in the waiting thread
            answer.set_exception(error)
        del item, answer, work  # the objects of this call must not stay alive until the next one
