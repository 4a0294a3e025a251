"""Trees of guesses that grow level by level, one pass each, those together that are not done."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.backends.batch import Ints
from foreword.backends.interface import HeadInput, HeadOutput, KvStore, RowsRunner, head_output
from foreword.drafters.heads.head_tree import HeadTree
from foreword.drafters.heads.levels import level_arrays
from foreword.drafters.heads.vocabulary import DraftVocabulary
from foreword.drafters.model.next_level import add_tokens, are_plainly_greedy, grow_chains, grow_trees


class Begun(NamedTuple):
    """Where the trees begin: behind the newest tokens, which were read."""

    output: HeadOutput  # of these
    tables: Ints  # [trees, pages]
    starts: Ints  # [trees], KV rows before these are not seen


def grow_by_passes(
    trees: Sequence[HeadTree], begun: Begun, runner: RowsRunner, store: KvStore, vocabulary: DraftVocabulary
) -> None:
    """Let all trees grow to their ends; a row of a guess is made from the states of its parent, if there are any."""
    output, tables, starts = begun
    is_chain = all(tree.width == 1 for tree in trees)
    are_greedy = is_chain and are_plainly_greedy(trees)
    while True:
        sizes = [len(tree.frontier) for tree in trees]
        if are_greedy:
            add_tokens(trees, vocabulary.likeliest(output.logits), {})
        elif is_chain:
            grow_chains(trees, vocabulary.spread(output.logits))
        else:
            grow_trees(trees, vocabulary.spread(output.logits))
        sources = _sources(trees, sizes)
        going = [place for place, tree in enumerate(trees) if not tree.is_done]
        if not going:
            return
        if len(going) < len(trees):
            trees, starts, tables = [trees[place] for place in going], starts[going], tables[going]
        arrays = level_arrays(trees, tables, store.page_size)
        states = _taken(output.states, sources)
        output = head_output(runner, HeadInput(arrays, starts, states, are_own=True), store)


def _sources(trees: Sequence[HeadTree], sizes: Sequence[int]) -> list[int]:
    """For every node that is read next, the row of its parent among those that were read last."""
    rows: list[int] = []
    first = 0
    for tree, size in zip(trees, sizes, strict=True):
        if not tree.is_done:
            rows += (first + place for place in tree.sources)
        first += size
    return rows


def _taken(states: Tensor, rows: list[int]) -> Tensor:
    """These rows; no copy where they are all of them in their order, as with chains."""
    return states if rows == list(range(len(states))) else states[torch.tensor(rows)]
