"""N-grams by their first token, bounded: the least recently used are forgotten."""

from collections import OrderedDict

Gram = tuple[int, ...]
"""What followed a token once."""

_BYTES_PER_GRAM = 250
"""Memory of one n-gram of four tokens with its share of the tables, as tracemalloc has it on CPython 3.11."""


class NgramPool:
    """At most `most` n-grams, at most `per_token` of them for one token."""

    def __init__(self, per_token: int, most: int) -> None:
        self._per_token = per_token
        self._most = most
        self._grams: OrderedDict[int, OrderedDict[Gram, None]] = OrderedDict()  # the newest last, both
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, token: int, gram: Gram) -> None:
        """Remember what followed a token, or that it did so again."""
        followers = self._grams.setdefault(token, OrderedDict())
        self._grams.move_to_end(token)
        self._count += gram not in followers
        followers[gram] = None
        followers.move_to_end(gram)
        if len(followers) > self._per_token:
            followers.popitem(last=False)
            self._count -= 1
        if self._count > self._most:
            self._drop_oldest()

    def after(self, token: int) -> list[Gram]:
        """What followed a token, the newest first; asking counts as use."""
        followers = self._grams.get(token)
        if followers is None:
            return []
        self._grams.move_to_end(token)
        return list(reversed(followers))

    def memory_bytes(self) -> int:
        """About what it takes."""
        return self._count * _BYTES_PER_GRAM

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._grams))
        self._grams[oldest].popitem(last=False)
        self._count -= 1
        if not self._grams[oldest]:
            del self._grams[oldest]
