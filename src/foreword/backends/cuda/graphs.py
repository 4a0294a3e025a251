"""Captured passes, by shape."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from foreword.backends.cold import note_cold_run
from foreword.backends.interface import KvStore

_log = logging.getLogger(__name__)
Shape = TypeVar("Shape")
T = TypeVar("T")


@dataclass
class GraphCache(Generic[Shape, T]):
    """Runs a pass, and from its second time on replays the capture of it.

    What comes once is not worth capturing. All captures share one pool of memory: a result has to be copied, in the
    order of the stream, before the next pass begins.
    """

    limit: int = 256  # captures that are kept
    _seen: set[Shape] = field(default_factory=set)
    _captured: "dict[Shape, tuple[torch.cuda.CUDAGraph, T]]" = field(default_factory=dict)
    _pool: Any = None

    def run(self, shape: Shape, body: Callable[[], T]) -> T:
        """`body` hands the pass over to the device; it reads its input from memory that stays in its place."""
        known = self._captured.get(shape)
        if known is None:
            is_new, has_room = shape not in self._seen, len(self._captured) < self.limit
            if is_new or has_room:
                note_cold_run()
            if not is_new and has_room:
                known = self._capture(shape, body)
        if known is None:
            self._seen.add(shape)
            return body()
        graph, result = known
        graph.replay()
        return result

    @property
    def captured(self) -> int:
        return len(self._captured)

    def _capture(self, shape: Shape, body: Callable[[], T]) -> "tuple[torch.cuda.CUDAGraph, T] | None":
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = body()
        except RuntimeError as error:
            # The allocator's error has a type of its own, the driver's, while a graph is made, only a text.
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            _log.warning("no memory is left to capture %s: such passes run without", shape)
            self.limit = len(self._captured)
            return None
        self._captured[shape] = graph, result
        return graph, result


class GraphsByMemory(Generic[Shape, T]):
    """A cache for every KV store: a captured pass reads and writes the one that it was captured with."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[KvStore, GraphCache[Shape, T]] = WeakKeyDictionary()

    def of(self, store: KvStore) -> GraphCache[Shape, T]:
        """It lives as long as the store does."""
        if store not in self._of:
            self._of[store] = GraphCache()
        return self._of[store]
