"""Fixed-size KV pages with reference counts."""

from collections import Counter
from collections.abc import Iterable, Sequence

from foreword.errors import ForewordError


class OutOfPages(ForewordError):  # noqa: N818 - named after the condition
    """Not enough free pages; nothing was allocated."""


class BlockPool:
    """Allocates page numbers and counts their holders.

    A page with one holder may be written; a shared page is read-only.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages, or raise `OutOfPages` and allocate none."""
        if count > len(self._free):
            raise OutOfPages(
                f"the KV cache has {len(self._free)} free pages and {count} are needed; "
                "use a larger KV cache or fewer, shorter requests"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one holder from each page; a page without holders is free."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is released more often than it was taken")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Return whether the page has several holders."""
        return self._holders[page] > 1

    def shares_any(self, pages: Iterable[int]) -> bool:
        """Return whether any of the pages has several holders."""
        return max(map(self._holders.__getitem__, pages), default=0) > 1

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless holder counts match `tables` and all other pages are free."""
        held = Counter(page for table in tables for page in table)
        expected = [held.get(page, 0) for page in range(self.num_pages)]
        wrong = [page for page in range(self.num_pages) if expected[page] != self._holders[page]]
        if wrong:
            raise AssertionError(
                f"the holder counts of pages {wrong} differ from the number of tables with them"
            )
        if sorted(self._free) != [page for page in range(self.num_pages) if self._holders[page] == 0]:
            raise AssertionError("the free list is not the set of pages without holders")
