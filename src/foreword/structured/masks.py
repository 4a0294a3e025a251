"""Limits the cost of masks, and computes slow ones between passes."""

import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Event, Lock, Thread, get_native_id
from time import monotonic, thread_time
from typing import TYPE_CHECKING, TypeVar

from foreword.structured.limits import MaskLimits

if TYPE_CHECKING:
    from foreword.structured.state import GrammarState

Clock = Callable[[], float]  # a function that returns seconds


class TenantBudgets:
    """CPU time that each tenant's requests used above the allowance of their tokens; thread-safe."""

    def __init__(self, limits: MaskLimits | None = None, now: Clock = monotonic) -> None:
        self.limits = limits or MaskLimits()
        self._now = now
        self._lock = Lock()
        self._used: dict[str, tuple[float, float]] = {}  # by tenant: CPU seconds, and when they were recorded

    def spend(self, tenant: str, seconds: float) -> bool:
        """Add to a tenant's use; return whether the total is within the limit."""
        with self._lock:
            now = self._now()
            used = self._use_at(tenant, now) + seconds
            # Tenants whose use has decayed are removed, so that the table does not grow.
            self._used = {name: entry for name, entry in self._used.items() if self._use_at(name, now) > 0}
            self._used[tenant] = used, now
            return used <= self.limits.tenant_excess

    def _use_at(self, tenant: str, now: float) -> float:
        """Return a tenant's use at this time; it decreases while no request adds to it."""
        used, then = self._used.get(tenant, (0.0, now))
        return max(0.0, used - (now - then) * self.limits.tenant_refill)


class MaskBudget:
    """Limits the CPU time of one answer's masks.

    Each committed token adds an allowance. The use may exceed it by a limit per answer and a limit per tenant.
    """

    def __init__(self, tenants: TenantBudgets, tenant: str = "", clock: Clock = thread_time) -> None:
        self._tenants = tenants
        self._tenant = tenant
        self.limits = tenants.limits
        self.clock = clock  # CPU seconds of the calling thread
        self.used = 0.0  # CPU seconds of all masks
        self._free = self.limits.free_per_token  # allowance so far, initially for the first token
        self._excess = 0.0  # highest use above the allowance so far, which the tenant was charged

    @property
    def has_excess(self) -> bool:
        """Return whether masks took more than the allowance of the tokens so far."""
        return self.used > self._free

    def earn(self, tokens: int) -> None:
        """Add the allowance of committed tokens."""
        self._free += tokens * self.limits.free_per_token

    def spend(self, seconds: float) -> str | None:
        """Add the cost of a mask; return why the answer must end, or None."""
        self.used += seconds
        excess = self.used - self._free
        if seconds > self.limits.one_mask:
            return f"the mask of the next token takes longer than {self.limits.one_mask:g} s; simplify the grammar"
        if excess <= self._excess:
            return None
        increase, self._excess = excess - self._excess, excess
        if excess > self.limits.request_excess:
            seconds = self.limits.request_excess
            return f"its masks took over {seconds:g} s more than allowed for its tokens; simplify the grammar"
        if not self._tenants.spend(self._tenant, increase):
            return (
                f"masks of all requests of this tenant took over {self.limits.tenant_excess:g} s more than allowed for "
                "their tokens; wait, or simplify the grammars"
            )
        return None


log = logging.getLogger("foreword.structured")


class MaskWorker:
    """Computes masks in a thread started on demand; the answer whose masks took the least CPU time is first."""

    def __init__(self) -> None:
        self._waiting: list[GrammarState] = []
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closed = False
        self._done = Event()

    def put(self, answer: "GrammarState") -> None:
        """Queue an answer whose next mask is needed."""
        with self._changed:
            self._waiting.append(answer)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="foreword-masks", daemon=True)
                self._thread.start()
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until a mask is computed; return at once if one was since the last call."""
        self._done.wait(seconds)
        self._done.clear()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        yield_to_passes()
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                answer = min(self._waiting, key=lambda waiting: waiting.used)
                self._waiting.remove(answer)
            try:
                answer.prepare()
            except BaseException:  # includes panics of the parser; the thread must continue
                log.exception("a mask could not be computed; the next pass tries again")
            del answer  # do not keep an ended answer alive
            self._done.set()


T = TypeVar("T")

NICENESS = 10
"""Niceness of threads for grammars: while passes use all cores, such a thread gets about a tenth of one core."""


def yield_to_passes() -> None:
    """Lower the priority of this thread permanently. Does nothing except on Linux, which has priorities per thread."""
    if sys.platform == "linux":
        thread = get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS))


def in_yielding_thread(work: Callable[[], T]) -> T:
    """Run `work` in a low-priority thread and return its result.

    It has a thread of its own, because the caller's priority, once lowered, could not be raised again.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            yield_to_passes()
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    # A daemon thread, since an interrupt and the end of the process would wait for a thread of an executor.
    Thread(target=run, name="foreword-grammar", daemon=True).start()
    return result.result()
