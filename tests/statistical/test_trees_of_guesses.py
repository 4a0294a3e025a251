"""Trees drawn by a model that drafts keep the target's law under *traversal*.

The Markov pair of `test_chains_of_guesses.py`, as many texts, the same two statistics and so the same power: a
next-token law that is off by a total variation of 0.025 after any two tokens is seen in at least 99 of 100 runs, a law
of whole texts that is off by 0.06 in 99. `test_these_biases_would_be_seen` there computes this from simulated runs.
"""

from collections.abc import Sequence

import pytest

from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from helpers.guessed_texts import CHAIN, MANY, OTHER, TARGET, Found, answers, check_law, model_drafter
from helpers.markov_pair import peaked_logits

WIDTH, NODES = 3, 9
"""Three siblings, of which the first is followed by two and the second by one: cousins are drawn, too."""


def tree_answers(drafter: Drafter, samples: int = MANY) -> Found:
    return answers("traversal", drafter, samples, chain=NODES)


def test_drawn_trees_keep_the_law():
    found = tree_answers(model_drafter(OTHER, WIDTH))
    assert min(found.guesses("accepted")[:CHAIN]) > MANY / 5
    check_law(found.texts)


def test_more_of_a_tree_is_accepted_than_of_its_first_chain():
    tree = tree_answers(model_drafter(OTHER, WIDTH), 500)
    chain = answers("block", model_drafter(OTHER), 500, chain=CHAIN)
    assert sum(tree.guesses("accepted")) > sum(chain.guesses("accepted"))


def test_a_drafter_that_is_the_target_has_its_first_chain_accepted():
    """No statistics here: a q that is not quite what was drawn from costs acceptance at once."""
    found = tree_answers(model_drafter(TARGET, WIDTH), 200)
    assert found.guesses("accepted") == [200] * CHAIN


def test_a_draft_model_with_padding_ids_keeps_the_law():
    check_law(tree_answers(model_drafter(peaked_logits(seed=3, padding=2), WIDTH), 800).texts)


class Late(Drafter):
    """Hands in every draft when the text has gone on by a token, and nothing in between."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._made: dict[int, Draft] = {}

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        late = [self._made.pop(ask.request.request_id, None) for ask in asks]
        fresh = [ask for ask, draft in zip(asks, late, strict=True) if draft is None]
        for ask, draft in zip(fresh, self._drafter.propose(fresh), strict=True):
            self._made[ask.request.request_id] = draft
        return [draft or Draft() for draft in late]

    def forget(self, request: DraftRequest) -> None:
        self._made.pop(request.request_id, None)
        self._drafter.forget(request)


def test_late_trees_keep_the_law():
    """What is left of a tree below the token that came is as good as a tree that was drawn there."""
    found = tree_answers(Late(model_drafter(OTHER, WIDTH)), 800)
    assert sum(found.guesses("accepted")) > 160
    check_law(found.texts)


@pytest.mark.parametrize(
    "nodes", [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_trees_of_every_size_keep_the_law(nodes: int):
    """The last level is cut short."""
    check_law(answers("traversal", model_drafter(OTHER, WIDTH), 800, chain=nodes).texts)
