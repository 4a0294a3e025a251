"""Guesses from a datastore: the most frequent continuations as a tree."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foreword.drafters.datastore.format import DatastoreError
from foreword.drafters.datastore.search import Datastore
from foreword.drafters.lookup.rest import RestConfig, RestDrafter, build_rest, most_frequent
from foreword.drafters.registry import drafter_kinds
from foreword.errors import RequestError
from foreword.speculation.draft import Draft
from helpers.asks import ask
from helpers.stores import NumberTokenizer, make_store
from helpers.trees import root_path

TEXTS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 8], [9, 2, 3, 5]]


def drafter_on(tmp_path: Path, texts: list[list[int]] = TEXTS, **settings: Any) -> RestDrafter:
    make_store(tmp_path / "store", texts, 20)
    return RestDrafter(RestConfig("store", **settings), Datastore(tmp_path / "store"))


def paths(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.tokens[n] for n in root_path(draft, node)) for node in range(len(draft))]


def test_the_most_frequent_continuations_of_the_longest_match_are_guessed(tmp_path: Path):
    drafter = drafter_on(tmp_path)
    (draft,) = drafter.propose([ask([8, 1, 2], max_nodes=4)])
    assert draft.committed_len == 3
    assert paths(draft) == [(3,), (3, 4), (7,), (7, 8)]
    (shorter,) = drafter.propose(
        [ask([8, 7, 2], max_nodes=4)]
    )  # `7 2` occurs nowhere, and `2` alone is too short
    assert not len(shorter)
    (nothing,) = drafter.propose([ask([4, 5])])
    assert not len(nothing)


def test_a_shorter_end_counts_if_it_may(tmp_path: Path):
    drafter = drafter_on(tmp_path, min_match=1)
    (draft,) = drafter.propose([ask([8, 7, 2], max_nodes=2)])
    assert paths(draft) == [(3,), (3, 4)]


def test_budgets_are_kept(tmp_path: Path):
    drafter = drafter_on(tmp_path)
    for nodes in range(1, 9):
        for depth in range(1, 5):
            (draft,) = drafter.propose([ask([1, 2], max_nodes=nodes, max_depth=depth)])
            assert 0 < len(draft) <= nodes
            assert draft.depth <= depth


def test_rare_continuations_are_left_out(tmp_path: Path):
    texts = [[1, 2, 3]] * 9 + [[1, 2, 4]]
    (draft,) = drafter_on(tmp_path, texts, min_probability=0.2).propose([ask([1, 2])])
    assert paths(draft) == [(3,)]


def test_trees_are_the_most_frequent_beginnings():
    """Against counting every beginning one by one."""
    rng = random.Random(5)
    for _ in range(60):
        lines = [
            [rng.choice((1, 1, 1, 2, 3)) for _ in range(rng.randint(0, 4))] for _ in range(rng.randint(1, 30))
        ]
        followed = np.array([line + [-1] * (4 - len(line)) for line in lines])
        counts = Counter(tuple(line[:end]) for line in lines for end in range(1, len(line) + 1))
        nodes = rng.randint(1, 12)
        draft = Draft(*most_frequent(followed, nodes, 0.0))
        kept = paths(draft)
        assert len(kept) == min(nodes, len(counts))
        assert (
            sorted((counts[path] for path in kept), reverse=True)
            == sorted(counts.values(), reverse=True)[:nodes]
        )


def test_another_tokenizer_is_refused(tmp_path: Path):
    make_store(tmp_path / "store", TEXTS, 20)

    def resources(vocab_size: int) -> Any:
        return SimpleNamespace(checkpoint=SimpleNamespace(tokenizer=lambda: NumberTokenizer(vocab_size)))

    build_rest(RestConfig(str(tmp_path / "store")), resources(20)).close()
    with pytest.raises(DatastoreError, match="another tokenizer, that of numbers"):
        build_rest(RestConfig(str(tmp_path / "store")), resources(21))


@pytest.mark.parametrize(
    "settings",
    [
        {"min_match": 0},
        {"max_match": 17},
        {"min_match": 5, "max_match": 4},
        {"max_matches": 0},
        {"min_probability": 2},
    ],
)
def test_senseless_settings_are_refused_by_name(settings: dict[str, Any]):
    with pytest.raises(RequestError, match=next(iter(settings))):
        drafter_kinds()["rest"].configure({"datastore": "x", **settings})


def test_the_datastore_has_to_be_named():
    with pytest.raises(RequestError, match="needs 'datastore'"):
        drafter_kinds()["rest"].configure({})
