"""Tree shapes given as paths of ranks: Medusa's published choices, or measured ones."""

import heapq
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from foreword.drafters.trees import Shape
from foreword.errors import RequestError

RANKS = 10
"""Number of top tokens per head that a path may select from."""

Path = tuple[int, ...]
Paths = tuple[Path, ...]


def read_choices(value: object, origin: str) -> Paths:
    """Parse paths of ranks, most useful first: [[0], [0, 0], [1], ...]."""
    paths = tuple(tuple(path) if isinstance(path, list | tuple) else () for path in _listed(value))
    if not paths or not all(paths) or not all(map(_is_rank, (rank for path in paths for rank in path))):
        raise RequestError(
            f"{origin}: medusa_choices must be a list of paths of ranks below {RANKS}, such as [[0], [0, 0], [1]]"
        )
    return tuple(dict.fromkeys(paths))


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _is_rank(rank: object) -> bool:
    return isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < RANKS


@lru_cache(maxsize=256)
def fitting(paths: Paths, max_nodes: int, max_depth: int) -> Paths:
    """Return the first paths that fit and whose prefixes are included, level by level."""
    kept: dict[Path, None] = {}
    for path in paths:
        beginnings = [path[:length] for length in range(1, len(path) + 1)]
        missing = [part for part in beginnings if part not in kept]
        if len(path) <= max_depth and len(kept) + len(missing) <= max_nodes:
            kept.update(dict.fromkeys(missing))
    return tuple(sorted(kept, key=lambda path: (len(path), path)))


@lru_cache(maxsize=256)
def shape_of(paths: Paths) -> Shape:
    """Return the children per node of the previous level; `paths` are sorted by level."""
    levels: list[tuple[int, ...]] = []
    before: list[Path] = [()]
    while followers := [path for path in paths if len(path) == len(levels) + 1]:
        levels.append(tuple(sum(path[:-1] == parent for path in followers) for parent in before))
        before = followers
    return tuple(levels)


class MeasuredRanks:
    """Counts the rank of the true token per head, and derives the best tree."""

    _EVERY = 64  # tokens between two evaluations
    _BELIEF = 20.0  # pseudo-count of the prior, in tokens

    def __init__(self, heads: int) -> None:
        self._hits = [
            [self._BELIEF * 0.6 * 0.8**head * 0.4**rank for rank in range(RANKS)] for head in range(heads)
        ]
        self._seen = [self._BELIEF] * heads
        self._total = 0
        self._ranked: dict[tuple[int, int], Paths] = {}

    def saw(self, head: int, rank: int | None) -> None:
        """Count a token that was at this rank of this head; None: below all ranks."""
        self._seen[head] += 1
        if rank is not None:
            self._hits[head][rank] += 1
        self._total += 1
        if self._total % self._EVERY == 0:
            self._ranked.clear()

    def paths(self, max_nodes: int, max_depth: int) -> Paths:
        """Return the paths with the highest acceptance probability, level by level."""
        size = (max_nodes, max_depth)
        if size not in self._ranked:
            self._ranked[size] = fitting(self._likeliest(max_nodes, max_depth), max_nodes, max_depth)
        return self._ranked[size]

    def _likeliest(self, max_nodes: int, max_depth: int) -> Paths:
        found: list[Path] = []
        open_paths: list[tuple[float, Path]] = [(-1.0, ())]
        while open_paths and len(found) <= max_nodes:
            chance, path = heapq.heappop(open_paths)
            found.append(path)
            head = len(path)
            if head < min(max_depth, len(self._hits)):
                for rank, hits in enumerate(self._hits[head]):
                    heapq.heappush(open_paths, (chance * hits / self._seen[head], (*path, rank)))
        return tuple(found[1:])


class PendingRanks:
    """Rankings of one request's future positions, until their tokens are known."""

    def __init__(self) -> None:
        self._lists: deque[tuple[int, list[list[int]]]] = deque()  # (text length, [heads][ranks])

    def add(self, length: int, ranked: list[list[int]]) -> None:
        """Add rankings for the positions from `length` on."""
        if not self._lists or self._lists[-1][0] < length:
            self._lists.append((length, ranked))

    def settle(self, known: int, tokens: Sequence[int], ranks: MeasuredRanks) -> None:
        """Count the new tokens from `known` on."""
        for length, ranked in self._lists:
            for place in range(max(known, length), min(len(tokens), length + len(ranked))):
                ranked_tokens = ranked[place - length]
                rank = ranked_tokens.index(tokens[place]) if tokens[place] in ranked_tokens else None
                ranks.saw(place - length, rank)
        while self._lists and self._lists[0][0] + len(self._lists[0][1]) <= len(tokens):
            self._lists.popleft()
