"""Guesses of heads that say in one pass what stands at all the places ahead, each for itself."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import Tensor

from foreword.drafters.heads.head_tree import HeadTree
from foreword.drafters.heads.vocabulary import DraftVocabulary
from foreword.drafters.model.next_level import are_plainly_greedy, grow_chains, grow_trees
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask


def guess_at_once(
    asks: Sequence[Ask], places: Sequence[int], logits: Tensor, vocabulary: DraftVocabulary, width: int
) -> list[Draft]:
    """A chain, or a tree of `width`, for every ask.

    `places` says how many places ahead each has logits for; these stand one after the other, [sum of places, draft
    vocabulary]. What is guessed for one place does not depend on what was guessed before it, so that a tree's nodes
    of one level all have the same distribution.
    """
    trees, firsts = new_trees(asks, places, width)
    if width == 1 and are_plainly_greedy(trees):
        tokens = vocabulary.likeliest(logits)
        return [
            _greedy(ask, tokens[first : first + count])
            for ask, first, count in zip(asks, firsts, places, strict=True)
        ]
    spread = vocabulary.spread(logits)
    grow_levels(trees, firsts, lambda _, rows: spread[rows], width > 1)
    return [tree.draft() for tree in trees]


def new_trees(asks: Sequence[Ask], places: Sequence[int], width: int) -> tuple[list[HeadTree], list[int]]:
    """Trees to grow, and the row of each one's first place."""
    trees = [
        HeadTree(ask._replace(max_depth=min(ask.max_depth, count)), width, room=width * count)
        for ask, count in zip(asks, places, strict=True)
    ]
    return trees, list(accumulate(places, initial=0))[:-1]


def grow_levels(
    trees: Sequence[HeadTree],
    firsts: Sequence[int],
    logits: Callable[[Sequence[HeadTree], list[int]], Tensor],
    branches: bool,
    is_worth: Callable[[HeadTree, int], bool] = lambda tree, row: True,
) -> None:
    """Grow all trees to their ends. Each one's places are rows from its `first` on.

    `logits` says, for trees and a row for each of their newest nodes, what may follow there. A tree ends
    where the next place `is_worth` nothing: that is decided before anything is drawn for it.
    """
    going = list(zip(trees, firsts, strict=True))
    while going := [
        (tree, first) for tree, first in going if not tree.is_done and is_worth(tree, first + tree.depth)
    ]:
        rows = [first + tree.depth for tree, first in going for _ in tree.frontier]
        now, grow = [tree for tree, _ in going], grow_trees if branches else grow_chains
        grow(now, logits(now, rows))


def _greedy(ask: Ask, tokens: list[int]) -> Draft:
    """A chain of the likeliest tokens, up to the first place that has none."""
    chain = tokens[: min(ask.max_nodes, ask.max_depth)]
    chain = chain[: chain.index(-1)] if -1 in chain else chain
    return Draft.chain(chain, len(ask.request.tokens), ask.request.epoch)
