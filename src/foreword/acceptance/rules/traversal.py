"""Traversal verification (arXiv 2505.12398): *block* for trees.

Nodes are judged depth first: children in draft order, and each node after all its descendants are rejected. The first
accepted node ends the traversal, and its path is accepted. Every node carries a share of the target's probability. A
rejected child reduces the share of its parent, and changes the target's distribution for the next child to the
residual.

The rule is exact if each token was sampled from its q given all nodes before it, and if the tree's shape does not
depend on the tokens. Siblings may therefore be sampled with replacement (they have the same q), without replacement
(each q excludes the earlier siblings), or chosen (probability 1).
"""

from dataclasses import dataclass

import numpy as np
import torch

from foreword.acceptance.distribution import KeptTokens
from foreword.acceptance.rules.chains import ChainRows
from foreword.acceptance.rules.trees import DraftTrees, Floats, Ints


@dataclass(frozen=True)
class Residual:
    """The distribution of the token after a row, once some of the row's children are rejected."""

    ids: Ints  # [kept], ascending
    probs: Floats  # [kept], sum 1
    carried: float  # share of the target's probability that is left for ending the path at this row

    def chance(self, token: int, q: float) -> float:
        """Return the share that a child with this token carries if it was sampled with probability q."""
        slot = int(np.searchsorted(self.ids, token))
        is_possible = slot < len(self.ids) and self.ids[slot] == token and q > 0
        return min(1.0, self.carried * float(self.probs[slot]) / q) if is_possible else 0.0

    def without(self, q: Floats) -> "Residual":
        """Return the residual after one more child was rejected, which was sampled from `q` [kept]."""
        if not len(
            self.ids
        ):  # a row without a distribution fails its request if the accepted path ends there
            return self
        weights = np.maximum(self.carried * self.probs - q, 0.0)
        mass = float(weights.sum())
        if mass > 0:
            return Residual(self.ids, weights / mass, mass / (mass + (1 - self.carried)))
        # No mass is left only if p and q differ by rounding: use p.
        return self if self.carried == 1 else Residual(self.ids, self.probs, 0.0)


@dataclass(frozen=True)
class TraversalPlan:
    """Acceptance probabilities under *traversal*; only the rows of requests with this rule are valid."""

    accept: Floats  # [all rows], acceptance probability given that all nodes judged before were rejected
    residuals: dict[
        int, Residual
    ]  # by row, the distribution of the target's own token if the path ends there


def plan(chains: ChainRows, requests: Ints) -> TraversalPlan:
    """Return the acceptance probabilities and residuals of all rows of these requests."""
    trees, kept = chains.trees, _KeptRows.of(chains)
    accept = np.zeros(len(trees.tokens))  # [all rows]
    residuals = {}
    carried = np.zeros(
        len(accept)
    )  # [all rows]; a parent is computed before its children, whose rows come later
    for request in requests.tolist():
        root, end = trees.starts[request], trees.starts[request + 1]
        carried[root] = 1.0
        children_of = children(trees, request)
        for row in range(root, end):
            residual = kept.target(row, float(carried[row]))
            for child in children_of[row - root]:
                ids, probs = kept.node_q(child)
                token = trees.token_list[child]
                carried[child] = residual.chance(token, float(probs[ids == token].sum()))
                residual = residual.without(kept.q_at(residual.ids, ids, probs))
            accept[row], residuals[row] = residual.carried, residual
    return TraversalPlan(accept, residuals)


def children(trees: DraftTrees, request: int) -> list[list[int]]:
    """Return the children of each row of the request, [rows of the request]; children are in draft order."""
    root, end = trees.starts[request], trees.starts[request + 1]
    children_of: list[list[int]] = [[] for _ in range(root, end)]
    for row in range(root + 1, end):
        children_of[trees.parent_list[row] - root].append(row)
    return children_of


def visits(trees: DraftTrees, request: int) -> list[int]:
    """Return the rows of a request in the order in which they are judged; the root is last."""
    root, children_of = trees.starts[request], children(trees, request)
    # Visiting a node before its children, and the last child first, is the reverse of the order of judgement.
    reversed_visits, stack = [], [root]
    while stack:
        row = stack.pop()
        reversed_visits.append(row)
        stack += children_of[row - root]
    return reversed_visits[::-1]


def stop_rows(trees: DraftTrees, requests: Ints, accept: Floats, uniforms: Floats) -> Ints:
    """Return the last row of each request's accepted path, [requests].

    It is the first row, in the order of `visits`, whose uniform is below its acceptance probability, else the root.
    `uniforms` has one random number per row of the batch.
    """
    stops = []
    for request in requests.tolist():
        root = trees.starts[request]
        order = visits(trees, request)
        stops.append(next(row for row in order if row == root or uniforms[row] < accept[row]))
    return np.array(stops, np.int64)


def leftover_weights(chains: ChainRows, plan: TraversalPlan, stops: Ints) -> KeptTokens:
    """Return the tokens that can follow each stop row, with the logarithms of their residual probabilities.

    `stops` [requests] are the last accepted rows.
    """
    sorted_stops = np.sort(stops).tolist()  # `KeptTokens` are sorted by row
    residuals = [plan.residuals[row] for row in sorted_stops]
    rows = np.repeat(np.array(sorted_stops, np.int64), [len(residual.ids) for residual in residuals])
    ids = np.concatenate([np.empty(0, np.int64), *(residual.ids for residual in residuals)])
    probs = np.concatenate([np.empty(0), *(residual.probs for residual in residuals)])
    is_possible = probs > 0
    device = chains.totals.device
    columns = [torch.from_numpy(column[is_possible]).to(device) for column in (rows, ids, probs)]
    return KeptTokens(columns[0], columns[1], columns[2].log())


@dataclass(frozen=True)
class _KeptRows:
    """The distributions of target and drafter at the selected rows, copied to the host."""

    chains: ChainRows
    rows: Ints  # [kept], row of each kept token, ascending
    ids: Ints  # [kept], id of the token
    probs: Floats  # [kept], target's probability of the token
    scratch: Floats  # [vocab], zeros between calls

    @staticmethod
    def of(chains: ChainRows) -> "_KeptRows":
        kept = chains.kept
        probs = kept.log_weights.exp() / chains.totals[kept.rows]
        rows, ids = kept.rows.cpu().numpy(), kept.ids.cpu().numpy()
        return _KeptRows(chains, rows, ids, probs.cpu().numpy(), np.zeros(chains.shaped.logits.shape[1]))

    def target(self, row: int, carried: float) -> Residual:
        """Return the target's distribution after a row: its residual before a child is rejected."""
        start, end = np.searchsorted(self.rows, (row, row + 1))
        return Residual(self.ids[start:end], self.probs[start:end], carried)

    def node_q(self, row: int) -> tuple[Ints, Floats]:
        """Return a node's q as (ids, probabilities), restricted to the target's vocabulary."""
        q = self.chains.trees.q
        start, end = np.searchsorted(q.rows, (row, row + 1))
        ids, probs = q.ids[start:end], q.probs[start:end]
        is_valid = (ids >= 0) & (ids < len(self.scratch))
        return ids[is_valid], probs[is_valid]

    def q_at(self, tokens: Ints, ids: Ints, probs: Floats) -> Floats:
        """Return q = (ids, probs) at each of the tokens, [tokens]; 0 outside its support."""
        self.scratch[ids] = probs
        values: Floats = self.scratch[tokens]
        self.scratch[ids] = 0.0
        return values
