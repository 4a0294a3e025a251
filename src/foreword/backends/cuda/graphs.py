"""Captures passes as CUDA graphs, one per shape, and replays them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from foreword.backends.interface import KvStore
from foreword.kernels.recording import is_recording

_log = logging.getLogger(__name__)
Shape = TypeVar("Shape")
T = TypeVar("T")


STALE_RUNS = 4
"""A capture is stale, and may be replaced, after this many times `limit` passes without use.

If the oldest were replaced at once, `limit` + 1 shapes that take turns would be captured anew in every pass.
"""


@dataclass
class PassCounts:
    """Counts, in this process, of passes through a `GraphCache`; replays are not counted."""

    captured: int = 0
    eager: int = 0  # ran without a graph
    cold: int = 0  # passes that were the first of their shape, or were captured


PASSES = PassCounts()


@dataclass
class _Capture(Generic[T]):
    graph: torch.cuda.CUDAGraph
    result: T
    last_run: int = 0  # value of `GraphCache._runs` at its last replay


@dataclass
class GraphCache(Generic[Shape, T]):
    """Runs a pass, captures it when its shape occurs again or its kernels are loaded, and replays it from then on.

    A full cache replaces the least recently used capture once it is stale; until then new shapes run without a graph.
    All captures and their results share one memory pool. So a result must be copied, in stream order, before the next
    pass begins.
    """

    limit: int = 256  # maximum captures
    _seen_shapes: set[Shape] = field(default_factory=set)
    _captured: "dict[Shape, _Capture[T]]" = field(default_factory=dict)  # least recently used first
    _runs: int = 0
    _pool: Any = None

    def run(
        self, shape: Shape, body: Callable[[], T], load: Callable[[], bool] | None = None
    ) -> tuple[T, bool]:
        """Run the pass; return its result, and whether it was cold: the first of its shape, or one that was captured.

        `body` launches the pass and reads its input from memory at fixed addresses. `load` is called before each pass
        that has no capture, and returns whether all its kernels are loaded. If they are, the pass is captured at once,
        unless it is the first pass of this cache.
        """
        if is_recording():
            return body(), False
        self._runs += 1
        capture, is_cold = self._captured.pop(shape, None), False
        if capture is None:
            is_loaded = load is not None and load() and bool(self._seen_shapes)
            is_new = shape not in self._seen_shapes and not is_loaded
            is_captured = not is_new and self._make_room()
            is_cold = is_new or is_captured
            if is_captured:
                capture = self._capture(shape, body)
        PASSES.cold += is_cold
        if capture is None:
            self._seen_shapes.add(shape)
            PASSES.eager += 1
            return body(), is_cold
        capture.last_run = self._runs
        self._captured[shape] = capture
        capture.graph.replay()
        return capture.result, is_cold

    @property
    def captured(self) -> int:
        return len(self._captured)

    def _make_room(self) -> bool:
        """Return whether one more capture may be stored; release the least recently used one if it is stale."""
        if len(self._captured) < self.limit:
            return True
        oldest = next(iter(self._captured), None)
        if oldest is None or self._runs - self._captured[oldest].last_run <= STALE_RUNS * self.limit:
            return False
        torch.cuda.synchronize()  # its last replay may still be running
        self._captured.pop(oldest).graph.reset()
        self._seen_shapes.discard(oldest)
        return True

    def _capture(self, shape: Shape, body: Callable[[], T]) -> "_Capture[T] | None":
        """Return a capture; None if there is no memory for it, and then no more captures are made (`limit`)."""
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = body()
        except RuntimeError as error:
            # torch's allocator raises OutOfMemoryError; during capture, the driver raises RuntimeError with this text.
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            _log.warning("no GPU memory is left to capture %s; such passes run without a CUDA graph", shape)
            self.limit = len(self._captured)
            return None
        PASSES.captured += 1
        return _Capture(graph, tree_map_only(Tensor, _without_ownership, result))


class _CudaBytes:
    """A range of GPU memory; a tensor made of it does not own the memory."""

    def __init__(self, first: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (first, False),
            "version": 2,
        }


def _without_ownership(result: Tensor) -> Tensor:
    """Return a tensor over the same memory that does not own it, so that later captures may use the memory, too."""
    storage = result.untyped_storage()
    if not result.is_cuda or storage.nbytes() == 0:
        return result
    memory = torch.as_tensor(_CudaBytes(storage.data_ptr(), storage.nbytes()), device=result.device)
    return memory.view(result.dtype).as_strided(result.shape, result.stride(), result.storage_offset())


class GraphsByMemory(Generic[Shape, T]):
    """One cache of captures per KV store: a captured pass reads and writes the store that it was captured with."""

    def __init__(self) -> None:
        self._caches: WeakKeyDictionary[KvStore, GraphCache[Shape, T]] = WeakKeyDictionary()

    def of(self, store: KvStore) -> GraphCache[Shape, T]:
        """Return the cache of a KV store, which lives as long as the store."""
        if store not in self._caches:
            self._caches[store] = GraphCache()
        return self._caches[store]
