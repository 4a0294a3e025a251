"""Rows of prompts whose first answer has ended before its siblings began."""

from collections.abc import Iterable

from foreword.engine.requests.request import Request
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence

_ENDED_WELL = ("stop", "length")


class KeptPrompts:
    """By the first answer: a copy of its prompt's rows, as long as one of its siblings waits for them.

    Full pages are shared, so the copy costs one page at most. It is the first to go when pages run short: requests
    that waited for it then compute the prompt again.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._kept: dict[int, KvSequence] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, leader: Request, waiting: Iterable[Request]) -> None:
        """Keep the prompt of an answer that ends, if a sibling waits for it; before its pages are given back."""
        rows = leader.prompt_len - 1
        if (
            leader.finish_reason in _ENDED_WELL
            and any(request.queued.leader is leader for request in waiting)
            and leader.kv.computed >= rows > 0
            and self._cache.can_fork(leader.kv, rows)
            and self._cache.available_pages
        ):
            self._kept[leader.request_id] = self._cache.fork(leader.kv, rows)

    def source(self, leader: Request) -> KvSequence:
        """Where the rows of its prompt are, if they are anywhere."""
        return self._kept.get(leader.request_id, leader.kv)

    def forget_unwanted(self, waiting: Iterable[Request]) -> None:
        """Give back the prompts that no request waits for."""
        if self._kept:
            wanted = {
                request.queued.leader.request_id for request in waiting if request.queued.leader is not None
            }
            for leader in self._kept.keys() - wanted:
                self._cache.close(self._kept.pop(leader))

    def give_up(self) -> bool:
        """Give all of it back; whether there was anything."""
        had_any = bool(self._kept)
        while self._kept:
            self._cache.close(self._kept.popitem()[1])
        return had_any
