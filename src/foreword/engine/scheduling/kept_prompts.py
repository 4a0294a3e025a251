"""Keeps the prompt's KV rows of an ended first answer for the other answers to the prompt."""

from collections.abc import Iterable

from foreword.engine.requests.request import Request
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence

_ENDED_WELL = ("stop", "length")  # finish reasons


class KeptPrompts:
    """Forks of the prompt rows of ended first answers ("leaders"), kept while another answer waits for them.

    A fork shares full pages, so it costs at most one page. When pages run short, the forks are released first, and
    waiting answers compute the prompt again.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._kept: dict[int, KvSequence] = {}  # by request id of the leader

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, leader: Request, waiting: Iterable[Request]) -> None:
        """Fork the prompt rows of an ended answer if another answer waits for them; call before closing its KV."""
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
        """Return the leader's sequence, or after its end the fork; it may lack the prompt's rows."""
        return self._kept.get(leader.request_id, leader.kv)

    def release_unneeded(self, waiting: Iterable[Request]) -> None:
        """Release prompts that no request waits for."""
        if self._kept:
            leaders = [request.scheduling.leader for request in waiting]
            wanted = {leader.request_id for leader in leaders if leader is not None}
            for request_id in self._kept.keys() - wanted:
                self._cache.close(self._kept.pop(request_id))

    def release_all(self) -> bool:
        """Release all prompts; return whether any was kept."""
        had_any = bool(self._kept)
        while self._kept:
            self._cache.close(self._kept.popitem()[1])
        return had_any
