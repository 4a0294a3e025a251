"""Common parts of *token* and *block*: probabilities of draft tokens, and sampling from the residual distribution.

p is the target's probability of a token, q the drafter's. *traversal* uses `ChainRows` too.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.distribution import (
    FIXED_POINT_ONE,
    Distributions,
    KeptTokens,
    best_per_row,
    kept_tokens,
    log_weights,
)
from foreword.acceptance.noise import Keys, key_tensor
from foreword.acceptance.rules.trees import NO_ROW, DraftTrees, Floats, Ints


@dataclass(frozen=True)
class ChainRows:
    """A batch, and the target's distributions at the rows of requests whose rule needs q (all except *coupled*)."""

    shaped: Distributions  # of all rows
    trees: DraftTrees  # of all requests
    kept: KeptTokens  # the kept tokens of the selected rows
    totals: Tensor  # float64 [all rows], sum of a row's weights; 0 at rows that are not selected

    @staticmethod
    def of(shaped: Distributions, trees: DraftTrees, rows: Ints) -> "ChainRows":
        """Select rows of a batch."""
        kept = kept_tokens(shaped, torch.from_numpy(rows).to(shaped.logits.device))
        totals = exact_sums(kept.rows, kept.log_weights.exp(), len(shaped.logits))
        return ChainRows(shaped, trees, kept, totals)

    def target(self, rows: Ints, ids: Ints) -> Floats:
        """Return p of each id after its row, float64 [pairs]; 0 outside the vocabulary."""
        device = self.shaped.logits.device
        is_valid = (ids >= 0) & (ids < self.shaped.logits.shape[1])
        row = torch.from_numpy(rows).to(device)
        weights = log_weights(self.shaped, row, torch.from_numpy(np.where(is_valid, ids, 0)).to(device)).exp()
        probabilities = torch.where(self.totals[row] > 0, weights / self.totals[row], 0.0)
        return np.where(is_valid, probabilities.cpu().numpy(), 0.0)


def exact_sums(rows: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return the sum of each row's weights, float64 [count]. Weights are in 0 .. 1; `rows` has the row of each.

    The sums are in 80-bit fixed point, so they do not depend on the order.
    """
    high = (weights * FIXED_POINT_ONE).floor()
    low = ((weights * FIXED_POINT_ONE - high) * FIXED_POINT_ONE).round()
    sums = torch.zeros((2, count), dtype=torch.int64, device=rows.device)
    sums = sums.index_add(1, rows, torch.stack([high.long(), low.long()]))
    return (sums[0].double() + sums[1].double() / FIXED_POINT_ONE) / FIXED_POINT_ONE


@dataclass(frozen=True)
class AcceptancePlan:
    """Acceptance probabilities under a rule; only the rows of its requests are valid."""

    accept: Floats  # [all rows], acceptance probability of the row's node
    carried: Floats  # [all rows], factor of p in the residual if the node is the last accepted one


@dataclass(frozen=True)
class Leftover:
    """Residual distribution of each request at its stop row: max(scale * p - q, 0), normalised."""

    stop_rows: Ints  # [requests], last accepted row
    scale: Floats  # [requests]
    next_rows: (
        Ints  # [requests], the rejected node, whose q is subtracted; NO_ROW: end of the draft, nothing is
    )


def ratios(chains: ChainRows, nodes: Ints) -> Floats:
    """Return p(x) / q(x) of the token x of each node, [all rows]; 0 if q(x) is 0, and at rows not in `nodes`."""
    tokens = chains.trees.tokens
    p, q = chains.target(nodes - 1, tokens[nodes]), chains.trees.q.at(nodes, tokens[nodes])
    ratio = np.zeros(len(tokens))
    ratio[nodes] = np.divide(p, q, out=np.zeros_like(p), where=q > 0)
    return ratio


def next_in_chain(trees: DraftTrees, rows: Ints) -> Ints:
    """Return the next node of each row, [rows]; NO_ROW at the last row of a request."""
    row_ends = trees.row_starts[1:][trees.request_of_row[rows]]
    return np.where(rows + 1 < row_ends, rows + 1, NO_ROW)


def leftover(trees: DraftTrees, plan: AcceptancePlan, stops: Ints) -> Leftover:
    """Return the distribution of each request's own token: the residual if a node was rejected, else p."""
    next_rows = next_in_chain(trees, stops)
    return Leftover(stops, np.where(next_rows == NO_ROW, 1.0, plan.carried[stops]), next_rows)


def leftover_weights(chains: ChainRows, left: Leftover) -> KeptTokens:
    """Return the kept tokens of the stop rows, with the logarithms of their residual weights."""
    count, device = len(chains.totals), chains.totals.device
    request_at = np.full(count, NO_ROW)  # [all rows], the request that stops at the row
    request_at[left.stop_rows] = np.arange(len(left.stop_rows))
    is_stop = torch.from_numpy(request_at).to(device)[chains.kept.rows] != NO_ROW
    rows, ids = chains.kept.rows[is_stop], chains.kept.ids[is_stop]
    request = request_at[rows.cpu().numpy()]
    p = chains.kept.log_weights[is_stop].exp() / chains.totals[rows]
    q_on_host = chains.trees.q.at(left.next_rows[request], ids.cpu().numpy())
    scale, q = (torch.from_numpy(column).to(device) for column in (left.scale[request], q_on_host))
    weights = (scale * p - q).clamp(min=0)
    # An empty residual means that p and q differ only by rounding: use p.
    is_empty = torch.zeros(count, dtype=torch.float64, device=device).index_add(0, rows, weights) == 0
    return KeptTokens(rows, ids, torch.where(is_empty[rows], p, weights).log())


def draw_leftover(chains: ChainRows, left: Leftover, keys: Keys) -> Ints:
    """Sample each request's own token, int64 [requests]; `keys` has one noise key per row of the batch."""
    tokens = best_per_row(leftover_weights(chains, left), key_tensor(keys, chains.totals.device))
    own: Ints = tokens.cpu().numpy()[left.stop_rows]
    return own
