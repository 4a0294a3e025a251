"""Trees of ranks: which of their nodes fit, which shape they have, and the tree that measured ranks ask for."""

import pytest

from foreword.drafters.heads.medusa import MeasuredRanks, PendingRanks, fitting, read_choices, shape_of
from foreword.errors import RequestError

PUBLISHED = ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 0, 0, 0), (3, 1))


def test_the_first_paths_that_fit_are_taken_each_behind_its_beginning():
    assert fitting(PUBLISHED, 3, 9) == ((0,), (1,), (0, 0))
    assert fitting(PUBLISHED, 64, 2) == ((0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (3, 1))
    assert fitting(PUBLISHED, 64, 9)[-2:] == ((0, 0, 0), (0, 0, 0, 0))
    assert len(fitting(PUBLISHED, 5, 9)) == 5


def test_a_path_whose_beginning_does_not_fit_is_left_out():
    assert fitting(((0, 0, 0), (1,)), 2, 9) == ((1,),)


def test_the_shape_is_how_many_follow_each_node():
    assert shape_of(fitting(PUBLISHED, 64, 3)) == ((4,), (2, 1, 0, 1), (1, 0, 0, 0))


@pytest.mark.parametrize("value", [None, [], [[]], [[0], 1], [[0, -1]], [[10]], [["0"]], [[True]], "all"])
def test_what_is_no_list_of_paths_is_refused(value: object):
    with pytest.raises(RequestError, match="medusa_choices must be a list of paths"):
        read_choices(value, "here")


def test_a_measured_tree_follows_the_ranks_that_tokens_had():
    ranks = MeasuredRanks(3)
    for turn in range(640):
        ranks.count(0, 1 if turn % 4 else 0)  # the second guess is right three times in four
        ranks.count(1, None)  # never right
        ranks.count(2, 0)
    assert ranks.paths(1, 3) == ((1,),)
    assert ranks.paths(2, 3) == ((0,), (1,))
    assert all(path[0] in (0, 1) for path in ranks.paths(4, 1)[:2])


def test_an_unseen_tree_begins_with_the_likeliest_chain():
    paths = MeasuredRanks(4).paths(5, 4)
    assert (0,) in paths and (0, 0) in paths and (1,) in paths
    assert all(len(path) <= 2 for path in MeasuredRanks(2).paths(60, 9))


def test_tokens_are_counted_once_for_every_head_that_guessed_them():
    seen: list[tuple[int, int | None]] = []

    class Noting(MeasuredRanks):
        def count(self, head: int, rank: int | None) -> None:
            seen.append((head, rank))

    awaited, ranks = PendingRanks(), Noting(2)
    awaited.add(3, [[7, 8], [9, 5]])
    awaited.settle(3, [1, 2, 3, 8], ranks)
    assert seen == [(0, 1)]
    awaited.add(4, [[6, 5], [4, 4]])
    awaited.settle(4, [1, 2, 3, 8, 5, 4], ranks)
    assert seen == [(0, 1), (1, 1), (0, 1), (1, 0)]
    awaited.settle(6, [1, 2, 3, 8, 5, 4, 4], ranks)
    assert len(seen) == 4
