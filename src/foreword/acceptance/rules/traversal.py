"""Traversal verification (arXiv 2505.12398): *block* for trees.

Nodes are judged depth first, children in draft order, each after all its descendants are rejected. Every node carries
a share of the target's probability. A rejected child reduces that share and the target's distribution for the next
child. The rule is exact if each token was drawn from its q given all nodes before it, and the tree's shape is
independent of them. So siblings may be drawn with replacement (one q), without (each q excludes the earlier ones), or
chosen (probability 1).
"""

from dataclasses import dataclass

import numpy as np
import torch

from foreword.acceptance.distribution import KeptTokens
from foreword.acceptance.rules.chains import ChainRows
from foreword.acceptance.rules.trees import DraftTrees, Floats, Ints


@dataclass(frozen=True)
class Rest:
    """The residual of the target's distribution after a row whose children are rejected."""

    ids: Ints  # [kept], ascending
    probs: Floats  # [kept], sum 1
    carried: float  # share of the target's probability that a path ending here still carries

    def chance(self, token: int, q: float) -> float:
        """Return the share carried by a child with this token, drawn with probability q."""
        slot = int(np.searchsorted(self.ids, token))
        known = slot < len(self.ids) and self.ids[slot] == token and q > 0
        return min(1.0, self.carried * float(self.probs[slot]) / q) if known else 0.0

    def without(self, taken: Floats) -> "Rest":
        """Return the rest after a child was rejected; `taken` [kept] is the child's q."""
        if not len(self.ids):  # a row without a distribution fails its request if it is reached
            return self
        left = np.maximum(self.carried * self.probs - taken, 0.0)
        spare = float(left.sum())
        if spare > 0:
            return Rest(self.ids, left / spare, spare / (spare + (1 - self.carried)))
        # No mass is left only if p and q differ by rounding: use p.
        return self if self.carried == 1 else Rest(self.ids, self.probs, 0.0)


@dataclass(frozen=True)
class TraversalPlan:
    """Acceptance probabilities before the uniforms are drawn; only this rule's rows are valid."""

    accept: Floats  # [all rows], acceptance probability given that everything judged before was rejected
    rests: dict[int, Rest]  # by row, the distribution of an own token after it


def plan(chains: ChainRows, requests: Ints) -> TraversalPlan:
    """Compute the acceptance probabilities of all rows of these requests, parents before children."""
    trees, accept, rests = chains.trees, np.zeros(len(chains.trees.tokens)), {}
    kept = _KeptRows.of(chains)
    carried = np.zeros(len(accept))
    for request in requests.tolist():
        root, end = trees.starts[request], trees.starts[request + 1]
        carried[root] = 1.0
        below = children(trees, request)
        for row in range(root, end):
            rest = kept.rest(row, float(carried[row]))
            for child in below[row - root]:
                ids, probs = kept.drawn(child)
                token = trees.token_list[child]
                carried[child] = rest.chance(token, float(probs[ids == token].sum()))
                rest = rest.without(kept.taken(rest.ids, ids, probs))
            accept[row], rests[row] = rest.carried, rest
    return TraversalPlan(accept, rests)


def children(trees: DraftTrees, request: int) -> list[list[int]]:
    """Return the children of each row of the request, in draft order."""
    root, end = trees.starts[request], trees.starts[request + 1]
    below: list[list[int]] = [[] for _ in range(root, end)]
    for row in range(root + 1, end):
        below[trees.parent_list[row] - root].append(row)
    return below


def visits(trees: DraftTrees, request: int) -> list[int]:
    """Return the rows of a request in judging order; the root is last."""
    root, below = trees.starts[request], children(trees, request)
    backwards, open_rows = [], [root]
    while open_rows:
        row = open_rows.pop()
        backwards.append(row)
        open_rows += below[row - root]
    return backwards[::-1]


def stop_rows(trees: DraftTrees, requests: Ints, accept: Floats, uniforms: Floats) -> Ints:
    """Return each request's first row, in judging order, that its uniform accepts, [requests]; a root always is."""
    stops = []
    for request in requests.tolist():
        root = trees.starts[request]
        order = visits(trees, request)
        stops.append(next(row for row in order if row == root or uniforms[row] < accept[row]))
    return np.array(stops, np.int64)


def leftover_weights(chains: ChainRows, plan: TraversalPlan, stops: Ints) -> KeptTokens:
    """Return the tokens that can follow each stop row, with their residual log weights."""
    order = np.sort(stops).tolist()
    rests = [plan.rests[row] for row in order]
    rows = np.repeat(np.array(order, np.int64), [len(rest.ids) for rest in rests])
    ids = np.concatenate([np.empty(0, np.int64), *(rest.ids for rest in rests)])
    probs = np.concatenate([np.empty(0), *(rest.probs for rest in rests)])
    alive = probs > 0
    device = chains.totals.device
    left = [torch.from_numpy(column[alive]).to(device) for column in (rows, ids, probs)]
    return KeptTokens(left[0], left[1], left[2].log())


@dataclass(frozen=True)
class _KeptRows:
    """Distributions of target and drafts on the host, by row."""

    chains: ChainRows
    rows: Ints  # [kept], ascending
    ids: Ints  # [kept]
    probs: Floats  # [kept]
    scratch: Floats  # [vocab], zeros

    @staticmethod
    def of(chains: ChainRows) -> "_KeptRows":
        kept = chains.kept
        probs = kept.log_weights.exp() / chains.totals[kept.rows]
        rows, ids = kept.rows.cpu().numpy(), kept.ids.cpu().numpy()
        return _KeptRows(chains, rows, ids, probs.cpu().numpy(), np.zeros(chains.shaped.logits.shape[1]))

    def rest(self, row: int, carried: float) -> Rest:
        start, end = np.searchsorted(self.rows, (row, row + 1))
        return Rest(self.ids[start:end], self.probs[start:end], carried)

    def drawn(self, row: int) -> tuple[Ints, Floats]:
        """Return a node's q, restricted to the target's vocabulary."""
        q = self.chains.trees.q
        start, end = np.searchsorted(q.rows, (row, row + 1))
        ids, probs = q.ids[start:end], q.probs[start:end]
        known = (ids >= 0) & (ids < len(self.scratch))
        return ids[known], probs[known]

    def taken(self, kept: Ints, ids: Ints, probs: Floats) -> Floats:
        """Return a node's q at each kept token, [kept]."""
        self.scratch[ids] = probs
        taken: Floats = self.scratch[kept]
        self.scratch[ids] = 0.0
        return taken
