"""EAGLE-2's tree: expanded by cumulative score, reranked, within any node budget."""

import math
import random

import pytest

from foreword.drafters.trees import HeadTree
from foreword.speculation.draft import ROOT
from helpers.asks import ask


class Oracle:
    """Scores of children that depend on the path alone."""

    def __init__(self, seed: int, width: int) -> None:
        self._seed, self._width = seed, width

    def children(self, path: tuple[int, ...]) -> list[tuple[float, int]]:
        """(log share, token), the best first."""
        rng = random.Random(f"{self._seed}{path}")
        weights = sorted((rng.random() ** 4 for _ in range(20)), reverse=True)
        total = sum(weights)
        tokens = rng.sample(range(50), 20)
        return [(math.log(w / total), t) for w, t in zip(weights, tokens, strict=True)][: self._width]


def grown(oracle: Oracle, nodes: int, depth: int, width: int, room: int = 64) -> HeadTree:
    tree = HeadTree(ask([1, 2, 3], nodes, depth), width, room)
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    while not tree.is_done:
        level = []
        for parent in tree.frontier:
            for score, token in oracle.children(paths[parent]):
                paths[len(tree.tokens) + len(level)] = (*paths[parent], token)
                level.append((tree.score(parent) + score, parent, token, None))
        tree.grow(level)
    return tree


def eagle2(oracle: Oracle, nodes: int, depth: int, width: int) -> dict[tuple[int, ...], float]:
    """The pseudo-code of the paper: a beam of `width`, all children in a pool, the best of the pool."""
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(depth):
        level = [(s + c, (*path, token)) for s, path in beam for c, token in oracle.children(path)]
        pool += level
        beam = sorted(level, reverse=True)[:width]
    return {path: score for score, path in sorted(pool, reverse=True)[:nodes]}


def paths_of(tree: HeadTree) -> set[tuple[int, ...]]:
    draft = tree.draft()
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    return set(paths)


@pytest.mark.parametrize("nodes", [1, 3, 8, 25, 60])
@pytest.mark.parametrize(("depth", "width"), [(1, 4), (3, 2), (5, 4), (6, 10)])
def test_the_draft_is_that_of_eagle_2(nodes: int, depth: int, width: int):
    """Candidates that cannot be among the best are not followed, and that changes nothing."""
    for seed in range(5):
        oracle = Oracle(seed, width)
        tree = grown(oracle, nodes, depth, width)
        assert paths_of(tree) == set(eagle2(oracle, nodes, depth, width))
        assert tree.num_read <= (depth - 1) * width + width


def test_few_nodes_are_read_where_few_are_wanted():
    tree = grown(Oracle(0, 8), nodes=4, depth=10, width=8)
    assert tree.num_read < 16


def test_no_more_nodes_are_read_than_there_are_rows():
    tree = grown(Oracle(1, 4), nodes=60, depth=12, width=4, room=10)
    assert tree.num_read <= 10


def test_a_node_sees_its_ancestors_and_itself():
    tree = HeadTree(ask([1, 2, 3], 10, 4), 2, 64)
    tree.grow([(-0.1, ROOT, 7, None), (-0.2, ROOT, 8, None)])
    assert tree.masks() == [0b01, 0b10]
    tree.grow([(-0.3, 1, 5, None), (-0.4, 0, 6, None), (-0.5, 0, 4, None)])
    assert [tree.tokens[node] for node in tree.frontier] == [5, 6]
    assert tree.sources == [1, 0]
    assert tree.masks() == [0b0110, 0b1001]


def test_equal_scores_never_part_a_node_from_its_parent():
    tree = HeadTree(ask([1], 3, 5), 1, 64)
    for token in (4, 5, 6):
        tree.grow([(0.0, tree.frontier[0], token, None)])
    assert tree.is_done
    assert tree.draft().parents == (ROOT, 0, 1)
