import pytest

from foreword.speculation.draft import ROOT, Draft


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
