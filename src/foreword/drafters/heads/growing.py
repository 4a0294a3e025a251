"""Grows the drafts of heads: level by level with a pass per level, or from the logits of all positions at once."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import BatchArrays, Ints
from foreword.backends.interface import HeadInput, HeadOutput, KvStore, RowsRunner, head_output
from foreword.drafters.heads.loading import DraftVocabulary
from foreword.drafters.next_level import add_tokens, are_all_argmax, grow_chains, grow_trees
from foreword.drafters.trees import HeadTree
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftTask

_NONE = np.empty(0, np.int32)
_NO_COPIES = np.empty((0, 2), np.int32)


def level_arrays(trees: Sequence[HeadTree], tables: Ints, page_size: int) -> BatchArrays:
    """Return the arrays of a pass over the newest level of every tree; `tables` has one row of pages per tree.

    Rows of draft tokens follow the text in the order in which they were computed, and attend to all of it.
    """
    counts = [len(tree.frontier) for tree in trees]
    lengths = [len(tree.request.tokens) for tree in trees]
    tokens = [tree.tokens[node] for tree in trees for node in tree.frontier]
    columns: list[tuple[int, int, int, int]] = []  # of each node: tree index, text length, KV row, position
    for tree_index, (tree, length, count) in enumerate(zip(trees, lengths, counts, strict=True)):
        first_row = length + tree.num_read - count
        for index in range(count):
            columns.append((tree_index, length, first_row + index, length + tree.depth - 1))
    tree_of_node, prefixes, rows, positions = np.array(columns, np.int32).T.copy()
    pages = rows // page_size
    return BatchArrays(
        ancestor_masks=np.array([mask for tree in trees for mask in tree.masks()], np.uint64)
        .view(np.int64)
        .reshape(-1, 1),
        token_ids=np.array(tokens, np.int32),
        positions=positions,
        slots=tables[tree_of_node, pages] * page_size + rows % page_size,
        prefix_lens=prefixes,
        row_starts=np.array([0, *accumulate(counts)], np.int32),
        block_tables=tables,
        kv_lens=np.array([n + tree.num_read for n, tree in zip(lengths, trees, strict=True)], np.int32),
        logit_rows=np.arange(len(tokens), dtype=np.int32),
        kv_copies=_NO_COPIES,
        hidden_rows=_NONE,
    )


def grow_by_passes(
    trees: Sequence[HeadTree],
    output: HeadOutput,
    tables: Ints,
    starts: Ints,
    runner: RowsRunner,
    store: KvStore,
    vocabulary: DraftVocabulary,
) -> None:
    """Grow all trees to their limits; a draft token's row uses its parent's states, if the head has any.

    `output` is the head's output for the newest tokens. `tables` has the page tables [trees, pages], and `starts` the
    first KV row to which the rows of each tree attend, [trees].
    """
    is_chain = all(tree.width == 1 for tree in trees)
    are_greedy = is_chain and are_all_argmax(trees)
    while True:
        sizes = [len(tree.frontier) for tree in trees]
        if are_greedy:
            add_tokens(trees, vocabulary.likeliest(output.logits), {})
        elif is_chain:
            grow_chains(trees, vocabulary.spread(output.logits))
        else:
            grow_trees(trees, vocabulary.spread(output.logits))
        sources = _sources(trees, sizes)
        unfinished = [index for index, tree in enumerate(trees) if not tree.is_done]
        if not unfinished:
            return
        if len(unfinished) < len(trees):
            trees = [trees[index] for index in unfinished]
            starts, tables = starts[unfinished], tables[unfinished]
        arrays = level_arrays(trees, tables, store.page_size)
        states = output.states
        if sources != list(range(len(states))):  # otherwise no copy is needed
            states = states[torch.tensor(sources)]
        output = head_output(runner, HeadInput(arrays, starts, states, are_own=True), store)


def _sources(trees: Sequence[HeadTree], sizes: Sequence[int]) -> list[int]:
    """Return, for every node of the next pass, its parent's row in the previous pass."""
    rows: list[int] = []
    first = 0
    for tree, size in zip(trees, sizes, strict=True):
        if not tree.is_done:
            rows += (first + source for source in tree.sources)
        first += size
    return rows


def draft_at_once(
    tasks: Sequence[DraftTask],
    position_counts: Sequence[int],
    logits: Tensor,
    vocabulary: DraftVocabulary,
    width: int,
) -> list[Draft]:
    """Return a chain, or a tree of `width`, per task.

    `position_counts` has the number of positions with logits per task; `logits` is [their sum, draft vocabulary].
    Positions do not depend on earlier draft tokens, so that all nodes of a level share a distribution.
    """
    trees, firsts = new_trees(tasks, position_counts, width)
    if width == 1 and are_all_argmax(trees):
        tokens = vocabulary.likeliest(logits)
        return [
            _greedy(task, tokens[first : first + count])
            for task, first, count in zip(tasks, firsts, position_counts, strict=True)
        ]
    spread = vocabulary.spread(logits)
    grow_levels(trees, firsts, lambda _, rows: spread[rows], width > 1)
    return [tree.draft() for tree in trees]


def new_trees(
    tasks: Sequence[DraftTask], position_counts: Sequence[int], width: int
) -> tuple[list[HeadTree], list[int]]:
    """Return new trees, and the row of each tree's first position."""
    trees = [
        HeadTree(task._replace(max_depth=min(task.max_depth, count)), width, room=width * count)
        for task, count in zip(tasks, position_counts, strict=True)
    ]
    return trees, list(accumulate(position_counts, initial=0))[:-1]


def grow_levels(
    trees: Sequence[HeadTree],
    firsts: Sequence[int],
    logits: Callable[[Sequence[HeadTree], list[int]], Tensor],
    branches: bool,
    may_grow: Callable[[HeadTree, int], bool] = lambda tree, row: True,
) -> None:
    """Grow all trees to their limits; tree i uses the rows of logits from `firsts[i]` on, one row per level.

    `logits` receives trees and a row for each of their newest nodes, and returns the logits after these nodes. A tree
    ends where `may_grow(tree, row)` is false, which is decided before the level is sampled.
    """
    grow = grow_trees if branches else grow_chains
    unfinished = list(zip(trees, firsts, strict=True))
    while True:
        unfinished = [
            (tree, first)
            for tree, first in unfinished
            if not tree.is_done and may_grow(tree, first + tree.depth)
        ]
        if not unfinished:
            return
        growing = [tree for tree, _ in unfinished]
        rows = [first + tree.depth for tree, first in unfinished for _ in tree.frontier]
        grow(growing, logits(growing, rows))


def _greedy(task: DraftTask, tokens: list[int]) -> Draft:
    """Return a chain of the most likely tokens, up to the first position without one."""
    chain = tokens[: min(task.max_nodes, task.max_depth)]
    if -1 in chain:
        chain = chain[: chain.index(-1)]
    return Draft.chain(chain, len(task.request.tokens), task.request.epoch)
