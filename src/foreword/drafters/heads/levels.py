"""Lays out the rows of one level of guesses. Every level pays for this, so it is as short as can be."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from foreword.backends.batch import BatchArrays, Ints
from foreword.drafters.heads.head_tree import HeadTree

_NONE = np.empty(0, np.int32)
_NO_COPIES = np.empty((0, 2), np.int32)


def level_arrays(trees: Sequence[HeadTree], tables: Ints, page_size: int) -> BatchArrays:
    """The newest level of every tree; `tables` are their pages, one row for each.

    The rows of guesses stand behind the text in the order in which they were read, and see all of it.
    """
    counts = [len(tree.frontier) for tree in trees]
    lengths = [len(tree.request.tokens) for tree in trees]
    tokens = [tree.tokens[node] for tree in trees for node in tree.frontier]
    figures = [
        (owner, length, length + tree.num_read - count + place, length + tree.depth - 1)
        for owner, (tree, length, count) in enumerate(zip(trees, lengths, counts, strict=True))
        for place in range(count)
    ]
    owners, prefixes, rows, positions = np.array(figures, np.int32).T.copy()
    pages = rows // page_size
    return BatchArrays(
        ancestor_masks=np.array([mask for tree in trees for mask in tree.masks()], np.uint64)
        .view(np.int64)
        .reshape(-1, 1),
        token_ids=np.array(tokens, np.int32),
        positions=positions,
        slots=(tables[owners, pages] - pages) * page_size + rows,
        prefix_lens=prefixes,
        row_starts=np.array([0, *accumulate(counts)], np.int32),
        block_tables=tables,
        kv_lens=np.array([n + tree.num_read for n, tree in zip(lengths, trees, strict=True)], np.int32),
        logit_rows=np.arange(len(tokens), dtype=np.int32),
        kv_copies=_NO_COPIES,
        hidden_rows=_NONE,
    )
