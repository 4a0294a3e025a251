"""Keeps prompt rows of a finished first answer for its waiting siblings."""

from collections.abc import Iterable

from foreword.engine.requests.request import Request
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence

_ENDED_WELL = ("stop", "length")


class KeptPrompts:
    """Prompt rows of ended first answers, stored while another answer to the prompt waits for them.

    Full pages are shared, so a copy costs at most one page. When pages run short, the copies are released first, and
    waiting answers compute the prompt again.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._kept: dict[int, KvSequence] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, leader: Request, waiting: Iterable[Request]) -> None:
        """Keep the prompt of an ending answer if a sibling waits for it; called before its pages are freed."""
        rows = leader.prompt_len - 1
        if (
            leader.finish_reason in _ENDED_WELL
            and leader.params.n > 1
            and any(request.scheduling.leader is leader for request in waiting)
            and leader.kv.computed >= rows > 0
            and self._cache.can_fork(leader.kv, rows)
            and self._cache.available_pages
        ):
            self._kept[leader.request_id] = self._cache.fork(leader.kv, rows)

    def source(self, leader: Request) -> KvSequence:
        """Return the sequence that has the prompt's rows, if any."""
        return self._kept.get(leader.request_id, leader.kv)

    def release_unneeded(self, waiting: Iterable[Request]) -> None:
        """Release prompts that no request waits for."""
        if self._kept:
            wanted = {
                request.scheduling.leader.request_id
                for request in waiting
                if request.scheduling.leader is not None
            }
            for leader in self._kept.keys() - wanted:
                self._cache.close(self._kept.pop(leader))

    def release_all(self) -> bool:
        """Release all prompts; return whether there were any."""
        had_any = bool(self._kept)
        while self._kept:
            self._cache.close(self._kept.popitem()[1])
        return had_any
