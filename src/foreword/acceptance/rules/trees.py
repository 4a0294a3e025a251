"""The drafts of a batch as flat arrays.

Each request has one row for its newest committed token (the root), then one row for each draft token.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ID_BITS = 32
"""Bits for a token id in a (row, id) pair that is packed into one integer."""


@dataclass(frozen=True)
class Drawn:
    """The sparse distribution q from which a draft token was sampled; read-only."""

    ids: Ints  # [support], distinct, ascending
    probs: Floats  # [support], non-negative, sum 1

    def __post_init__(self) -> None:
        # Most ids are sorted, and checking is faster than sorting a whole vocabulary.
        is_sorted = self.ids.ndim == 1 and bool((self.ids[1:] > self.ids[:-1]).all())
        if (
            self.ids.shape != self.probs.shape
            or self.ids.ndim != 1
            or (not is_sorted and len(np.unique(self.ids)) != len(self.ids))
        ):
            raise ValueError("q needs distinct ids and one probability for each")
        if (self.ids < 0).any():
            raise ValueError("q has a negative id")
        probs = self.probs.astype(np.float64)
        total = float(probs.sum())
        # a comparison with NaN is False, so NaN is an error
        if (probs < 0).any() or not abs(total - 1) <= 1e-4:
            raise ValueError("q must hold probabilities that sum to 1")
        ids = self.ids.astype(np.int64)
        if not is_sorted:
            order = np.argsort(ids)
            ids, probs = ids[order], probs[order]
        probs = probs / total
        ids.flags.writeable = probs.flags.writeable = False
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "probs", probs)

    def prob(self, token: int) -> float:
        """Return the probability of a token; 0 outside the support."""
        slot = int(np.searchsorted(self.ids, token))
        return float(self.probs[slot]) if slot < len(self.ids) and self.ids[slot] == token else 0.0


@dataclass(frozen=True)
class NodeProbabilities:
    """The q of every draft token of a batch; a chosen node has probability 1 at its token.

    An entry is one token in the support of one node's q.
    """

    rows: Ints  # [entries], row of the entry's node, ascending
    ids: Ints  # [entries], ascending within a row
    probs: Floats  # [entries]

    @staticmethod
    def stack(rows: Ints, tokens: Ints, drawn: Sequence[Drawn | None]) -> "NodeProbabilities":
        """Concatenate the supports of the nodes; all arguments have one entry per node, in row order."""
        sizes = np.array([1 if q is None else len(q.ids) for q in drawn], np.int64)
        supports = [token if q is None else q.ids for token, q in zip(tokens[:, None], drawn, strict=True)]
        certain = np.ones(1)
        node_probs = [certain if q is None else q.probs for q in drawn]
        ids = np.concatenate([np.empty(0, np.int64), *supports])
        probs = np.concatenate([np.empty(0), *node_probs])
        probs.flags.writeable = False
        return NodeProbabilities(np.repeat(rows, sizes), ids, probs)

    def at(self, rows: Ints, ids: Ints) -> Floats:
        """Return, for each pair of a row and an id, q of the row's node at the id, [pairs]; 0 outside its support."""
        if not len(self.rows):
            return np.zeros(len(rows))
        keys = (self.rows << ID_BITS) + self.ids
        wanted = (rows << ID_BITS) + ids
        slot = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[slot] == wanted, self.probs[slot], 0.0)


NO_ROW = -1
"""Parent of a root row."""

NO_TOKEN = -1
"""Token of a root row, and of a row from which no token could be sampled."""


# Cached: the same few shapes recur in every step.
@lru_cache(maxsize=256)
def _requests_of_rows(starts: tuple[int, ...]) -> Ints:
    requests = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    requests.flags.writeable = False
    return requests


@lru_cache(maxsize=256)
def chain_parents(nodes: int) -> tuple[int, ...]:
    """Return the parents of a chain of `nodes` nodes, as indices in its draft; -1: the text."""
    return tuple(range(-1, nodes - 1))


@dataclass(frozen=True)
class DraftTrees:
    """The draft trees of a batch. Rows of a request: its root, then its draft tokens, parents before children.

    The logits of a row predict the token after it, so a node's token is judged with the logits of its parent's row.
    """

    starts: list[int]  # [requests + 1], root row of each request, then the number of rows
    token_list: list[int]  # [rows], NO_TOKEN at roots
    parent_list: list[int]  # [rows], row of the parent; NO_ROW at roots
    drawn: tuple[Drawn | None, ...]  # [nodes], q of each draft token; None: the token was chosen, without a q
    are_chains: bool = False  # whether all drafts are known to be chains

    @staticmethod
    def stack(
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[Drawn | None]] | None = None,
    ) -> "DraftTrees":
        """Build a batch; each argument has one list per request, with one element per node.

        A parent is the index of a node in the same draft; -1: the root.
        """
        count = len(tokens)
        if not any(parents):
            return DraftTrees(list(range(count + 1)), [NO_TOKEN] * count, [NO_ROW] * count, ())
        starts = [0]
        flat_tokens: list[int] = []
        flat_parents: list[int] = []
        for draft_tokens, draft_parents in zip(tokens, parents, strict=True):
            first = len(flat_tokens) + 1
            flat_tokens.append(NO_TOKEN)
            flat_tokens.extend(draft_tokens)
            flat_parents.append(NO_ROW)
            flat_parents.extend([first + parent for parent in draft_parents])
            starts.append(len(flat_tokens))
        nodes = len(flat_tokens) - count
        flat_drawn = (None,) * nodes if drawn is None else tuple(chain.from_iterable(drawn))
        are_chains = False not in [tuple(shape) == chain_parents(len(shape)) for shape in parents]
        return DraftTrees(starts, flat_tokens, flat_parents, flat_drawn, are_chains)

    def with_tokens(self, tokens: Sequence[Sequence[int]]) -> "DraftTrees":
        """Return the same trees with other tokens, one list of node tokens per request."""
        flat_tokens = [token for draft in tokens for token in (NO_TOKEN, *draft)]
        return DraftTrees(self.starts, flat_tokens, self.parent_list, self.drawn, self.are_chains)

    @property
    def is_plain(self) -> bool:
        """Return whether no request has a draft, so that each request has one row."""
        return not self.drawn

    def path_to(self, row: int) -> list[int]:
        """Return the rows from the first level to a row; empty for a root."""
        path: list[int] = []
        while (parent := self.parent_list[row]) != NO_ROW:
            path.append(row)
            row = parent
        return path[::-1]

    @cached_property
    def row_starts(self) -> Ints:
        return np.array(self.starts, np.int64)

    @cached_property
    def tokens(self) -> Ints:
        """Token of each row, [rows]; NO_TOKEN at roots."""
        return np.array(self.token_list, np.int64)

    @cached_property
    def parents(self) -> Ints:
        """Row of the parent, [rows]; NO_ROW at roots."""
        return np.array(self.parent_list, np.int64)

    @cached_property
    def depths(self) -> Ints:
        """Depth of each row, [rows]; 0 at roots."""
        depths: list[int] = []
        for parent in self.parent_list:  # a loop, because drafts are small and array operations take longer
            depths.append(0 if parent == NO_ROW else depths[parent] + 1)
        return np.array(depths, np.int64)

    @cached_property
    def branches(self) -> Ints:
        """Number of earlier rows with the same request and depth, [rows]; 0 along a chain."""
        counts: Counter[tuple[int, int]] = Counter()  # rows so far by (request, depth)
        branches = np.zeros(len(self.token_list), np.int64)
        for row, level in enumerate(zip(self.request_of_row.tolist(), self.depths.tolist(), strict=True)):
            branches[row] = counts[level]
            counts[level] += 1
        return branches

    @cached_property
    def q(self) -> NodeProbabilities:
        """The nodes' distributions, for the rules that need them."""
        nodes = np.flatnonzero(self.depths > 0)
        return NodeProbabilities.stack(nodes, self.tokens[nodes], self.drawn)

    @cached_property
    def roots(self) -> Ints:
        return self.row_starts[:-1]

    @cached_property
    def request_of_row(self) -> Ints:
        return _requests_of_rows(tuple(self.starts))

    @cached_property
    def is_chain(self) -> Bools:
        """Whether every node of a request follows the row before it, [requests]."""
        broken = (self.parents != np.arange(len(self.parents)) - 1) & (self.parents != NO_ROW)
        chains = np.ones(len(self.roots), np.bool_)
        chains[self.request_of_row[broken]] = False
        return chains

    @cached_property
    def path_tokens(self) -> Ints:
        """Draft tokens up to each row, the row's own token first, [rows, maximum depth]; then NO_TOKEN."""
        path = np.full((len(self.tokens), int(self.depths.max(initial=0))), NO_TOKEN, np.int64)
        row = np.arange(len(self.tokens))
        for level in range(path.shape[1]):
            exists = row != NO_ROW
            path[exists, level] = self.tokens[row[exists]]
            row = np.where(exists, self.parents[row], NO_ROW)
        return path

    def spread(self, sizes: Ints) -> tuple[Ints, Ints]:
        """Return all pairs of a row and an entry of its request's list, as two arrays (rows, entries).

        `sizes` [requests] are the lengths of the lists. An entry is an index into the concatenation of all lists.
        """
        size_of_row = sizes[self.request_of_row]
        rows = np.repeat(np.arange(len(size_of_row)), size_of_row)
        first_pair_of_row = np.cumsum(size_of_row) - size_of_row
        index_in_list = np.arange(len(rows)) - np.repeat(first_pair_of_row, size_of_row)
        list_starts = np.cumsum(sizes) - sizes
        return rows, list_starts[self.request_of_row[rows]] + index_in_list

    def reached(self, hit: Bools) -> Bools:
        """Return whether `hit` is True for a row and all its ancestors, [rows]; roots count as hit."""
        is_root = self.parents == NO_ROW
        is_reached: Bools = (
            hit | is_root
        )  # whether `hit` is True for the row and the `levels` - 1 rows above it
        ancestor = np.where(
            is_root, np.arange(len(hit)), self.parents
        )  # `levels` levels above the row, or the root
        levels = 1
        while levels <= self.depths.max(initial=0):  # each round doubles `levels`
            is_reached, ancestor, levels = is_reached & is_reached[ancestor], ancestor[ancestor], 2 * levels
        return is_reached

    def deepest(self, ok: Bools) -> Ints:
        """Return each request's deepest row for which `ok` is True, [requests]; on ties, the first row."""
        # Pack depth and row into one number: the depth counts most, and of equal depths the first row is the largest.
        count = len(ok)
        reversed_row = count - 1 - np.arange(count)
        best = np.maximum.reduceat(np.where(ok, self.depths, -1) * count + reversed_row, self.roots)
        return count - 1 - best % count
