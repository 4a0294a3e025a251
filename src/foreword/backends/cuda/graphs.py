"""Captured passes, by shape."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from foreword.backends.interface import KvStore
from foreword.kernels.recording import is_recording

_log = logging.getLogger(__name__)
Shape = TypeVar("Shape")
T = TypeVar("T")


STALE_RUNS = 4
"""Passes of other shapes, as a multiple of the limit, after which a capture may be replaced.

Otherwise limit + 1 shapes in turn would be captured at every pass, which costs more than it saves.
"""


@dataclass
class PassCounts:
    """Passes of this process with a size that can be captured."""

    captured: int = 0
    eager: int = 0  # ran without a graph
    cold: int = 0  # the first of their shape, and those that were captured


PASSES = PassCounts()


@dataclass
class _Capture(Generic[T]):
    graph: torch.cuda.CUDAGraph
    result: T
    last_run: int = 0


@dataclass
class GraphCache(Generic[Shape, T]):
    """Runs a pass, captures it the second time its shape occurs, and replays the capture from then on.

    A full cache replaces the capture that was used least recently. All captures share one memory pool: a result must
    be copied, in stream order, before the next pass begins.
    """

    limit: int = 256  # captures that are kept
    _seen: set[Shape] = field(default_factory=set)
    _captured: "dict[Shape, _Capture[T]]" = field(default_factory=dict)  # least recently used first
    _runs: int = 0
    _pool: Any = None

    def run(
        self, shape: Shape, body: Callable[[], T], load: Callable[[], bool] | None = None
    ) -> tuple[T, bool]:
        """Run the pass and return its result and whether it was cold: the first of its shape, or one that is captured.

        `body` launches the pass and reads its input from memory at fixed addresses. `load` loads the
        kernels of a new shape; where it returns true, the shape is captured at once, unless it is the very first.
        """
        if is_recording():
            return body(), False
        self._runs += 1
        known, is_cold = self._captured.pop(shape, None), False
        if known is None:
            is_loaded = load is not None and load() and bool(self._seen)
            is_new = shape not in self._seen and not is_loaded
            is_captured = not is_new and self._make_room()
            is_cold = is_new or is_captured
            if is_captured:
                known = self._capture(shape, body)
        PASSES.cold += is_cold
        if known is None:
            self._seen.add(shape)
            PASSES.eager += 1
            return body(), is_cold
        known.last_run = self._runs
        self._captured[shape] = known
        known.graph.replay()
        return known.result, is_cold

    @property
    def captured(self) -> int:
        return len(self._captured)

    def _make_room(self) -> bool:
        """Return whether one more capture may be kept; release the least recently used one if it is stale."""
        if len(self._captured) < self.limit:
            return True
        oldest = next(iter(self._captured), None)
        if oldest is None or self._runs - self._captured[oldest].last_run <= STALE_RUNS * self.limit:
            return False
        torch.cuda.synchronize()  # its last replay may still be running
        self._captured.pop(oldest).graph.reset()
        self._seen.discard(oldest)
        return True

    def _capture(self, shape: Shape, body: Callable[[], T]) -> "_Capture[T] | None":
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = body()
        except RuntimeError as error:
            # torch's allocator raises OutOfMemoryError; the driver raises a RuntimeError with this text during capture.
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            _log.warning("no memory is left to capture %s: such passes run without", shape)
            self.limit = len(self._captured)
            return None
        PASSES.captured += 1
        return _Capture(graph, result)


class GraphsByMemory(Generic[Shape, T]):
    """One cache per KV store: a captured pass uses the store that it was captured with."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[KvStore, GraphCache[Shape, T]] = WeakKeyDictionary()

    def of(self, store: KvStore) -> GraphCache[Shape, T]:
        """Return the cache of a KV store, which lives as long as the store."""
        if store not in self._of:
            self._of[store] = GraphCache()
        return self._of[store]
