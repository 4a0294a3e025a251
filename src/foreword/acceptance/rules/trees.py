"""The drafts of a batch as flat arrays: per request one root row (its committed end), then one row per draft node."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ID_BITS = 32


@dataclass(frozen=True)
class Drawn:
    """Sparse distribution of a sampled draft token; read-only."""

    ids: Ints  # [support], distinct, ascending
    probs: Floats  # [support], non-negative, sum 1

    def __post_init__(self) -> None:
        rises = self.ids.ndim == 1 and _rises(self.ids)
        if (
            self.ids.shape != self.probs.shape
            or self.ids.ndim != 1
            or (not rises and len(np.unique(self.ids)) != len(self.ids))
        ):
            raise ValueError("q needs distinct ids and one probability for each")
        if (self.ids < 0).any():
            raise ValueError("q has a negative id")
        probs = self.probs.astype(np.float64)
        total = float(probs.sum())
        if (probs < 0).any() or not abs(total - 1) <= 1e-4:  # which no sum with NaN in it fulfils
            raise ValueError("q must hold probabilities that sum to 1")
        ids = self.ids.astype(np.int64)
        if not rises:
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


def _rises(ids: Ints) -> bool:
    """Return whether the ids are sorted and distinct; faster than sorting a whole vocabulary."""
    return bool((ids[1:] > ids[:-1]).all())


@dataclass(frozen=True)
class NodeProbabilities:
    """The q of every draft node of a batch; a chosen node has probability 1 at its token."""

    rows: Ints  # [support], row of the entry's node, ascending
    ids: Ints  # [support], ascending within a row
    probs: Floats  # [support]

    @staticmethod
    def stack(rows: Ints, tokens: Ints, drawn: Sequence[Drawn | None]) -> "NodeProbabilities":
        """Concatenate the nodes' supports in row order."""
        sizes = np.array([1 if q is None else len(q.ids) for q in drawn], np.int64)
        chosen = [token if q is None else q.ids for token, q in zip(tokens[:, None], drawn, strict=True)]
        certain = np.ones(1)
        probs = [certain if q is None else q.probs for q in drawn]
        ids, joined = np.concatenate([np.empty(0, np.int64), *chosen]), np.concatenate([np.empty(0), *probs])
        joined.flags.writeable = False
        return NodeProbabilities(np.repeat(rows, sizes), ids, joined)

    def at(self, rows: Ints, ids: Ints) -> Floats:
        """Return q of the row's node at each id, [pairs]; 0 outside its support."""
        keys = (self.rows << ID_BITS) + self.ids
        wanted = (rows << ID_BITS) + ids
        slot = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
        if not len(keys):
            return np.zeros(len(wanted))
        return np.where(keys[slot] == wanted, self.probs[slot], 0.0)


NO_ROW = -1
NO_TOKEN = -1


# Cached: the same few shapes recur in every step.
@lru_cache(maxsize=256)
def _requests_of_rows(starts: tuple[int, ...]) -> Ints:
    found = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    found.flags.writeable = False
    return found


@dataclass(frozen=True)
class DraftTrees:
    """Rows of a request: its committed end (the root), then its draft nodes in topological order.

    A row's logits predict the token after it, so a node's token is judged by its parent's row.
    """

    starts: list[int]  # [requests + 1], root row of each request, then the number of rows
    token_list: list[int]  # [rows], NO_TOKEN at roots
    parent_list: list[int]  # [rows], row of the parent; NO_ROW at roots
    drawn: tuple[Drawn | None, ...]  # [nodes], each node's q; None: the token was chosen

    @staticmethod
    def stack(
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[Drawn | None]] | None = None,
    ) -> "DraftTrees":
        """Build a batch from per-request node lists (a parent is a node index or -1, as in a draft)."""
        count = len(tokens)
        if not any(parents):
            return DraftTrees(list(range(count + 1)), [NO_TOKEN] * count, [NO_ROW] * count, ())
        starts = [0]
        flat_tokens: list[int] = []
        flat_parents: list[int] = []
        for own_tokens, own_parents in zip(tokens, parents, strict=True):
            first = len(flat_tokens) + 1
            flat_tokens.append(NO_TOKEN)
            flat_tokens.extend(own_tokens)
            flat_parents.append(NO_ROW)
            flat_parents.extend([first + parent for parent in own_parents])
            starts.append(len(flat_tokens))
        nodes = len(flat_tokens) - count
        known = (None,) * nodes if drawn is None else tuple(q for of in drawn for q in of)
        return DraftTrees(starts, flat_tokens, flat_parents, known)

    def with_tokens(self, tokens: Sequence[Sequence[int]]) -> "DraftTrees":
        """Return the trees with the tokens of their nodes filled in, per request."""
        known = [token for own in tokens for token in (NO_TOKEN, *own)]
        return DraftTrees(self.starts, known, self.parent_list, self.drawn)

    @property
    def is_plain(self) -> bool:
        """Return whether no request has a draft: each row is a request."""
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
        for parent in self.parent_list:  # a loop: drafts are small and array operations cost more
            depths.append(0 if parent == NO_ROW else depths[parent] + 1)
        return np.array(depths, np.int64)

    @cached_property
    def branches(self) -> Ints:
        """Number of earlier rows with the same request and depth, [rows]; 0 along a chain."""
        seen: dict[tuple[int, int], int] = {}
        branches = np.zeros(len(self.token_list), np.int64)
        for row, place in enumerate(zip(self.request_of_row.tolist(), self.depths.tolist(), strict=True)):
            branches[row] = seen[place] = seen.get(place, -1) + 1
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
        """Return the draft tokens up to each row, the row's own first, [rows, deepest]; NO_TOKEN beyond the root."""
        path = np.full((len(self.tokens), int(self.depths.max(initial=0))), NO_TOKEN, np.int64)
        row = np.arange(len(self.tokens))
        for back in range(path.shape[1]):
            alive = row != NO_ROW
            path[alive, back] = self.tokens[row[alive]]
            row = np.where(alive, self.parents[row], NO_ROW)
        return path

    def spread(self, sizes: Ints) -> tuple[Ints, Ints]:
        """Pair each request's rows with its `sizes` list entries: (row, index into the concatenated lists)."""
        per_row = sizes[self.request_of_row]
        rows = np.repeat(np.arange(len(per_row)), per_row)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
        starts = np.cumsum(sizes) - sizes
        return rows, starts[self.request_of_row[rows]] + within

    def reached(self, hit: Bools) -> Bools:
        """Return whether a row and all its ancestors are hit, [rows]; roots always are."""
        is_root = self.parents == NO_ROW
        ok: Bools = hit | is_root
        above = np.where(is_root, np.arange(len(ok)), self.parents)
        levels = 1  # levels covered so far
        while levels <= self.depths.max(initial=0):
            ok, above, levels = ok & ok[above], above[above], 2 * levels
        return ok

    def deepest(self, ok: Bools) -> Ints:
        """Return each request's deepest row for which `ok` holds, [requests]; the first on ties."""
        order = np.where(ok, self.depths, -1) * len(ok) + (len(ok) - 1 - np.arange(len(ok)))
        best = np.maximum.reduceat(order, self.roots)
        return len(ok) - 1 - best % len(ok)
