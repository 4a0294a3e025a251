"""A drafter that fails, hangs or talks nonsense costs its guesses, never the request."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from numbers import Integral
from typing import Any, TypeVar

from foreword.speculation.draft import Draft
from foreword.speculation.protocols import Ask, Drafter, StepRequest, added_memory

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class GuardedDrafter:
    """Runs a drafter in a thread of its own with a time limit and checks what it returns.

    While a call hangs, the drafter has nothing to say; what it says when it comes back is too late.
    Every fault is counted by kind; the first of each kind is logged.
    """

    def __init__(self, drafter: Drafter, name: str, vocab_size: int, time_limit: float) -> None:
        self._drafter = drafter
        self._name = name
        self._vocab_size = vocab_size
        self._time_limit = time_limit
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"drafter-{name}")
        self._hanging: Future[Any] | None = None
        self.faults: Counter[str] = Counter()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """What the drafter says, as far as it can be used; an empty draft for the rest."""
        answers = self._call(lambda: list(self._drafter.propose(asks)))
        if answers is None:
            return [Draft()] * len(asks)
        if len(answers) != len(asks):
            self._fault("shape", f"{len(answers)} drafts for {len(asks)} requests")
            return [Draft()] * len(asks)
        return [self._checked(answer, ask) for answer, ask in zip(answers, asks, strict=True)]

    def forget(self, request: StepRequest) -> None:
        """Let the drafter drop what it keeps for a request; one that hangs does so when it comes back."""
        if self._hangs:
            self._submit(lambda: self._drafter.forget(request))
        else:
            self._call(lambda: self._drafter.forget(request))

    def memory_bytes(self) -> int | None:
        """What the drafter says of its memory."""
        return self._call(lambda: added_memory([self._drafter]))

    def fault_counts(self) -> Counter[str]:
        """By kind, under the drafter's name."""
        return Counter({f"{self._name}/{kind}": count for kind, count in self.faults.items()})

    def close(self) -> None:
        """Stop the thread; a call that hangs is left behind."""
        self._thread.shutdown(wait=self._hanging is None, cancel_futures=True)

    @property
    def _hangs(self) -> bool:
        return self._hanging is not None and not self._hanging.done()

    def _call(self, call: Callable[[], _Answer]) -> _Answer | None:
        if self._hangs or (future := self._submit(call)) is None:
            return None
        try:
            answer: _Answer = future.result(self._time_limit)
            return answer
        except FutureTimeoutError:
            self._hanging = future
            self._fault("timeout", f"no answer within {self._time_limit:g} s")
        except Exception as error:  # whatever a drafter raises, the request goes on
            self._fault("exception", f"{type(error).__name__}: {error}")
        return None

    def _submit(self, call: Callable[[], Any]) -> Future[Any] | None:
        """Hand a call to the thread; None if there is none any more: it is closed, or the interpreter exits."""
        try:
            return self._thread.submit(call)
        except RuntimeError:
            return None

    def _checked(self, answer: object, ask: Ask) -> Draft:
        if not isinstance(answer, Draft):
            self._fault("type", f"a {type(answer).__name__} instead of a draft")
            return Draft()
        problem = self._problem(answer, ask)
        if problem is not None:
            self._fault("draft", problem)
            return Draft()
        return answer

    def _problem(self, draft: Draft, ask: Ask) -> str | None:
        if len(draft) > ask.max_nodes:
            return f"{len(draft)} nodes where {ask.max_nodes} were asked for"
        if max(draft.depths(), default=0) > ask.max_depth:
            return f"a depth of {max(draft.depths())} where {ask.max_depth} was asked for"
        outside = [t for t in draft.tokens if not (isinstance(t, Integral) and 0 <= t < self._vocab_size)]
        return f"token {outside[0]} outside the vocabulary of {self._vocab_size}" if outside else None

    def _fault(self, kind: str, message: str) -> None:
        self.faults[kind] += 1
        if self.faults[kind] == 1:
            _log.warning("drafter %s: %s; its guesses are dropped, decoding goes on", self._name, message)
