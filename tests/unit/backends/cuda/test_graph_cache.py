"""Which captures a full cache replaces, without a GPU: graphs are stand-ins that count."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from foreword.backends.cuda.graphs import PASSES, STALE_RUNS, GraphCache

LIMIT = 2


class Graph:
    """A captured pass."""

    made: "list[Graph]"

    def __init__(self) -> None:
        self.replays = 0
        self.is_released = False
        Graph.made.append(self)

    def replay(self) -> None:
        assert not self.is_released
        self.replays += 1

    def reset(self) -> None:
        self.is_released = True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the device was asked to do, in order."""
    done: list[str] = []

    @contextmanager
    def capturing(*_: object, **__: object) -> Iterator[None]:
        done.append("capture")
        yield

    Graph.made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    yield done


def run(graphs: GraphCache[str, str], shapes: str) -> None:
    for shape in shapes:
        assert graphs.run(shape, lambda shape=shape: shape)[0] == shape  # type: ignore[misc]


def test_a_full_cache_replaces_the_least_recently_used_capture(calls: list[str]):
    graphs: GraphCache[str, str] = GraphCache(limit=LIMIT)
    run(graphs, "aabba")
    first, second = Graph.made
    run(graphs, "a" * STALE_RUNS * LIMIT + "cc")
    assert (first.is_released, second.is_released) == (False, True)
    assert calls == ["capture", "capture", "synchronize", "capture"]
    assert graphs.captured == LIMIT
    run(graphs, "ac")
    assert (first.replays, Graph.made[2].replays) == (3 + STALE_RUNS * LIMIT, 2)


def test_a_shape_that_was_replaced_is_captured_again_at_its_second_run(calls: list[str]):
    graphs: GraphCache[str, str] = GraphCache(limit=LIMIT)
    run(graphs, "bbaa" + "a" * STALE_RUNS * LIMIT + "cc" + "a" * STALE_RUNS * LIMIT)
    run(graphs, "b")
    assert len(Graph.made) == 3
    run(graphs, "b")
    assert len(Graph.made) == 4
    assert calls.count("synchronize") == 2


def test_one_shape_more_than_the_limit_in_turn_replaces_nothing(calls: list[str]):
    graphs: GraphCache[str, str] = GraphCache(limit=LIMIT)
    run(graphs, "abc" * 20)
    assert calls == ["capture", "capture"]


def test_without_memory_for_any_capture_none_is_replaced(calls: list[str]):
    graphs: GraphCache[str, str] = GraphCache(limit=0)
    run(graphs, "a" * 10)
    assert calls == []


def test_a_pass_whose_kernels_are_loaded_is_captured_at_once_unless_it_is_the_first_of_all(calls: list[str]):
    graphs: GraphCache[str, str] = GraphCache()
    before, loads = replace(PASSES), list[str]()

    def cold(shape: str, is_loaded: bool) -> bool:
        def load() -> bool:
            loads.append(shape)
            return is_loaded

        return graphs.run(shape, lambda: shape, load)[1]

    assert cold("a", True) and not calls
    assert cold("b", True) and calls == ["capture"]
    assert not cold("b", True)
    assert cold("c", False) and calls == ["capture"], "some of what it launches is not loaded"
    assert cold("c", False) and calls == ["capture"] * 2
    assert loads == ["a", "b", "c", "c"], "a captured pass has all"
    counted = [getattr(PASSES, name) - getattr(before, name) for name in ("captured", "eager", "cold")]
    assert counted == [2, 2, 4]
