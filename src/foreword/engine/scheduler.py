"""Who takes part in the next pass, and with how many rows."""

from collections import deque
from dataclasses import dataclass

from foreword.engine.request import Request
from foreword.errors import RequestError
from foreword.kv.paged_cache import PagedCache


@dataclass(frozen=True)
class SchedulerSizes:
    """Bounds of one pass."""

    max_rows: int  # committed tokens in a pass
    max_running: int  # requests that run at once
    draft_rows: int  # provisional rows that a request may need behind its tokens


class Scheduler:
    """First come, first served: decoding requests take their row, then prompts share the rest of the budget.

    A request is admitted once the pages of its longest possible answer are free, so none ever has to
    be thrown out again.
    """

    def __init__(self, cache: PagedCache, sizes: SchedulerSizes) -> None:
        self._cache = cache
        self._sizes = sizes
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._promised = 0  # pages that running requests may come to hold

    @property
    def has_requests(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request, or refuse one that could never be admitted."""
        if self._pages(request) > self._cache.pool.num_pages:
            raise RequestError(
                f"the request may need {request.final_len} tokens of KV cache and there are "
                f"{self._cache.pool.num_pages * self._cache.page_size}; lower max_tokens or enlarge the cache"
            )
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request wherever it is; its pages are given back."""
        if request in self._running:
            self._running.remove(request)
            self._promised -= self._pages(request)
            self._cache.close(request.kv)
        elif request in self._waiting:
            self._waiting.remove(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """The requests of the next pass, each with the number of committed tokens that it computes."""
        self._admit()
        budget = self._sizes.max_rows
        shares = []
        for request in sorted(self._running, key=_lag):
            run = min(_lag(request), budget)
            if run > 0:
                shares.append((request, run))
                budget -= run
        return shares

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._sizes.max_running:
            pages = self._pages(self._waiting[0])
            if self._promised + pages > self._cache.pool.num_pages:
                return
            request = self._waiting.popleft()
            request.kv = self._cache.open()
            self._running.append(request)
            self._promised += pages

    def _pages(self, request: Request) -> int:
        return self._cache.pages_for(request.final_len + self._sizes.draft_rows)


def _lag(request: Request) -> int:
    """Committed tokens without KV: one for a decoding request, more for a prompt. Sorting by it is stable."""
    return len(request.tokens) - request.kv.computed
