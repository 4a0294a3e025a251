import numpy as np
import pytest

from foreword.acceptance.rules.trees import Drawn
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Text


def test_a_chain_is_a_tree_of_width_one():
    chain = Draft.chain([7, 8, 9], committed_len=5)
    assert chain.parents == (ROOT, 0, 1)
    assert chain.depths() == (1, 2, 3)
    assert chain.ancestor_masks() == (0b1, 0b11, 0b111)


def test_depths_and_masks_of_a_tree():
    tree = Draft((1, 2, 3, 4), (ROOT, ROOT, 0, 2), 0)
    assert tree.depths() == (1, 1, 2, 3)
    assert tree.ancestor_masks() == (0b0001, 0b0010, 0b0101, 0b1101)


@pytest.mark.parametrize("parents", [(0,), (ROOT, 1), (ROOT, -2), (ROOT, 2)])
def test_cycles_and_unknown_parents_are_refused(parents: tuple[int, ...]):
    with pytest.raises(ValueError, match="parents come before"):
        Draft((1,) * len(parents), parents, 0)


def test_every_token_has_a_parent():
    with pytest.raises(ValueError, match="2 tokens but 1 parents"):
        Draft((1, 2), (ROOT,), 0)


TREE = Draft((1, 2, 3, 4, 5), (ROOT, ROOT, 0, 0, 2), committed_len=3)
r"""Below the text: 1 -> (3 -> 5, 4), and 2."""


@pytest.mark.parametrize(
    ("grown_by", "tokens", "parents"),
    [
        ([], (1, 2, 3, 4, 5), (ROOT, ROOT, 0, 0, 2)),
        ([1], (3, 4, 5), (ROOT, ROOT, 0)),
        ([1, 3], (5,), (ROOT,)),
        ([1, 3, 5], (), ()),
        ([2], (), ()),
        ([9], (), ()),
        ([1, 9], (), ()),
        ([1, 3, 5, 7], (), ()),
    ],
)
def test_a_draft_is_rebased_along_the_text_that_came(grown_by: list[int], tokens, parents):
    text = [7, 7, 7, *grown_by]
    assert TREE.rebase(text) == Draft(tokens, parents, len(text))


def test_a_draft_for_a_longer_text_than_there_is_has_nothing_to_say():
    assert len(TREE.rebase([7, 7])) == 0


def test_a_rebased_node_keeps_what_it_was_drawn_from():
    qs = [Drawn(np.array([token]), np.ones(1)) for token in (4, 5, 6)]
    chain = Draft.chain([4, 5, 6], 1, 2, qs)
    assert chain.rebase([0, 4]) == Draft.chain([5, 6], 2, 2, qs[1:])


def test_a_node_is_kept_with_all_its_ancestors_or_not_at_all():
    assert TREE.keep(lambda node: node != 0) == Draft((2,), (ROOT,), 3)
    assert TREE.keep(lambda node: node != 2) == Draft((1, 2, 4), (ROOT, ROOT, 0), 3)
    assert TREE.keep(lambda node: True) is TREE
    assert len(TREE.keep(lambda node: False)) == 0


@pytest.mark.parametrize(
    ("nodes", "depth", "tokens"),
    [(5, 3, (1, 2, 3, 4, 5)), (2, 9, (1, 2)), (9, 1, (1, 2)), (3, 2, (1, 2, 3)), (0, 3, ())],
)
def test_a_draft_is_cut_to_size_from_its_end(nodes: int, depth: int, tokens: tuple[int, ...]):
    assert TREE.within(nodes, depth).tokens == tokens


@pytest.mark.parametrize(
    "place", [slice(None, None, -1), slice(2, None, -1), slice(-2, None), slice(0, 2, -1)]
)
def test_a_text_is_cut_as_a_list_is(place: slice):
    assert Text([1, 2, 3, 4, 5], length=4)[place] == [1, 2, 3, 4][place]


def test_how_sure_a_drafter_is_stays_with_the_guesses_that_stay():
    chain = Draft.chain([1, 2, 3], 10, confidence=[0.9, 0.5, 0.2])
    assert chain.within(2, 8).confidence == (0.9, 0.5)
    assert chain.rebase([0] * 10 + [1]).confidence == (0.5, 0.2)
    assert chain.keep(lambda node: node != 1).confidence == (0.9,)
    tree = Draft((1, 2, 3), (-1, -1, 0), 10, confidence=(0.9, 0.5, 0.2))
    assert tree.keep(lambda node: node != 1).confidence == (0.9, 0.2)
    assert chain == Draft.chain([1, 2, 3], 10)  # the same guesses


@pytest.mark.parametrize("confidence", [[0.5], [0.5, 0.5, 0.5]])
def test_all_guesses_say_how_sure_or_none(confidence: list[float]):
    with pytest.raises(ValueError, match="2 tokens but"):
        Draft.chain([1, 2], 10, confidence=confidence)
