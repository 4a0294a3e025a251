"""Requests that come, compute their rows, publish them and go."""

from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence

PAGE = 4


def caching(num_pages: int = 16, page_size: int = PAGE) -> PagedCache:
    return PagedCache(num_pages, page_size, prefix_caching=True)


def compute(cache: PagedCache, sequence: KvSequence, tokens: list[int]) -> None:
    """Every token but the newest gets its row; what is full is published."""
    rows = len(tokens) - 1 - sequence.computed
    cache.reserve(sequence, rows)
    cache.settle_moves(cache.take_moves())
    cache.commit(sequence, rows, [])
    cache.publish(sequence, tokens)
    cache.check_integrity()


def answered(cache: PagedCache, tokens: list[int], tenant: str = "") -> list[int]:
    """A request comes and goes. Returns the pages it had."""
    sequence = cache.open(tenant, tokens)
    compute(cache, sequence, tokens)
    pages = list(sequence.pages)
    cache.close(sequence)
    cache.check_integrity()
    return pages
