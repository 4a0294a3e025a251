"""The drafts of a batch as flat arrays: one row per request for its committed end, one per draft node."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foreword.acceptance.drawn import Bools, Drawn, Floats, Ints, NodeProbabilities

__all__ = ["NO_ROW", "NO_TOKEN", "Bools", "DraftTrees", "Floats", "Ints"]

NO_ROW = -1
NO_TOKEN = -1


@dataclass(frozen=True)
class DraftTrees:
    """Row order within a request: its committed end (the root), then its draft nodes in topological order.

    A row's logits are about the token after it. So a node's own token is judged by its parent's row.
    """

    row_starts: Ints  # [requests + 1]
    tokens: Ints  # [rows], NO_TOKEN at roots
    parents: Ints  # [rows], row of the parent; NO_ROW at roots
    depths: Ints  # [rows], 0 at roots
    drawn: tuple[Drawn | None, ...]  # [nodes], what each node's token was drawn from; None: it was chosen

    @staticmethod
    def stack(
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[Drawn | None]] | None = None,
    ) -> "DraftTrees":
        """One batch from per-request node lists (a parent is a node index or -1, as in a draft)."""
        sizes = np.array([len(t) + 1 for t in tokens], np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        roots = starts[:-1]
        rows = int(starts[-1])
        is_node = np.ones(rows, np.bool_)
        is_node[roots] = False
        flat_tokens = np.full(rows, NO_TOKEN, np.int64)
        flat_parents = np.full(rows, NO_ROW, np.int64)
        if rows > len(roots):
            flat_tokens[is_node] = np.concatenate([np.asarray(t, np.int64) for t in tokens])
            local = np.concatenate([np.asarray(p, np.int64) for p in parents])
            flat_parents[is_node] = local + 1 + np.repeat(roots, sizes - 1)
        known = (None,) * (rows - len(roots)) if drawn is None else tuple(q for of in drawn for q in of)
        return DraftTrees(starts, flat_tokens, flat_parents, depths_of(flat_parents), known)

    @cached_property
    def q(self) -> NodeProbabilities:
        """What the nodes' tokens were drawn from, for the rules that ask."""
        nodes = np.flatnonzero(self.depths > 0)
        return NodeProbabilities.stack(nodes, self.tokens[nodes], self.drawn)

    @cached_property
    def roots(self) -> Ints:
        """Row of every request's committed end."""
        return self.row_starts[:-1]

    @cached_property
    def request_of_row(self) -> Ints:
        """[rows]"""
        sizes = np.diff(self.row_starts)
        return np.repeat(np.arange(len(sizes)), sizes)

    @cached_property
    def is_chain(self) -> Bools:
        """[requests], whether every node follows the row before it."""
        broken = (self.parents != np.arange(len(self.parents)) - 1) & (self.parents != NO_ROW)
        chains = np.ones(len(self.roots), np.bool_)
        chains[self.request_of_row[broken]] = False
        return chains

    @cached_property
    def path_tokens(self) -> Ints:
        """[rows, deepest], the draft tokens up to a row, the row's own first; NO_TOKEN behind the root."""
        path = np.full((len(self.tokens), int(self.depths.max(initial=0))), NO_TOKEN, np.int64)
        row = np.arange(len(self.tokens))
        for back in range(path.shape[1]):
            alive = row != NO_ROW
            path[alive, back] = self.tokens[row[alive]]
            row = np.where(alive, self.parents[row], NO_ROW)
        return path

    def spread(self, sizes: Ints) -> tuple[Ints, Ints]:
        """Pair each request's rows with its `sizes` list entries: (row, index into the joined lists)."""
        per_row = sizes[self.request_of_row]
        rows = np.repeat(np.arange(len(per_row)), per_row)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
        starts = np.cumsum(sizes) - sizes
        return rows, starts[self.request_of_row[rows]] + within

    def reached(self, hit: Bools) -> Bools:
        """[rows], the rows that are hit together with every node above them; roots always are."""
        is_root = self.parents == NO_ROW
        ok: Bools = hit | is_root
        above = np.where(is_root, np.arange(len(ok)), self.parents)
        levels = 1  # that `ok` speaks for, and that `above` looks up
        while levels <= self.depths.max(initial=0):
            ok, above, levels = ok & ok[above], above[above], 2 * levels
        return ok

    def deepest(self, ok: Bools) -> Ints:
        """[requests], the deepest row that is ok, the first of them if there are several."""
        order = np.where(ok, self.depths, -1) * len(ok) + (len(ok) - 1 - np.arange(len(ok)))
        best = np.maximum.reduceat(order, self.roots)
        return len(ok) - 1 - best % len(ok)

    def paths_to(self, rows: Ints) -> Ints:
        """[requests, deepest], the rows from the first level down to the given rows, then NO_ROW."""
        depths = self.depths[rows]
        paths = np.full((len(rows), int(depths.max(initial=0))), NO_ROW, np.int64)
        row = rows.copy()
        for level in range(paths.shape[1], 0, -1):
            here = np.flatnonzero(self.depths[row] == level)
            paths[here, level - 1] = row[here]
            row[here] = self.parents[row[here]]
        return paths


def depths_of(parents: Ints) -> Ints:
    """Depth of every row, by walking all rows up at once."""
    place = np.arange(len(parents))
    is_root = parents == NO_ROW
    if np.all(is_root | (parents == place - 1)):  # chains alone: count from the latest root
        return place - np.maximum.accumulate(np.where(is_root, place, 0))
    depths = np.zeros(len(parents), np.int64)
    row = parents.copy()
    while np.any(alive := row != NO_ROW):
        depths += alive
        row = np.where(alive, parents[row], NO_ROW)
    return depths
