"""Common parts of *token* and *block*: probabilities of draft tokens, and the residual distribution after a rejection.

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
    kept_tokens,
    log_weights,
)
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
    """Return the sum of each row's weights, float64 [count].

    `weights` are in 0 .. 1, and `rows` has the row of each weight. The sums are in 80-bit fixed point (two 40-bit
    integers), so they do not depend on the order of addition.
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
    carried: Floats  # [all rows], factor of p in the residual if the row is the last accepted one


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


def leftover_weights(chains: ChainRows, plan: AcceptancePlan, stops: Ints) -> KeptTokens:
    """Return the tokens that can follow each stop row, with the logarithms of their residual weights.

    `stops` [requests] are the last accepted rows. The weight of a token is max(carried * p - q, 0), where q is that of
    the rejected node. If all nodes were accepted, the weight is p.
    """
    rejected = next_in_chain(chains.trees, stops)  # [requests], the rejected node, or NO_ROW, which has no q
    factor = np.where(rejected == NO_ROW, 1.0, plan.carried[stops])  # [requests]
    count, device = len(chains.totals), chains.totals.device
    request_at = np.full(count, NO_ROW)  # [all rows], the request that stops at the row
    request_at[stops] = np.arange(len(stops))
    is_stop = torch.from_numpy(request_at).to(device)[chains.kept.rows] != NO_ROW
    rows, ids = chains.kept.rows[is_stop], chains.kept.ids[is_stop]
    request = request_at[rows.cpu().numpy()]
    p = chains.kept.log_weights[is_stop].exp() / chains.totals[rows]
    q = torch.from_numpy(chains.trees.q.at(rejected[request], ids.cpu().numpy())).to(device)
    weights = (torch.from_numpy(factor[request]).to(device) * p - q).clamp(min=0)
    # An empty residual means that p and q differ only by rounding: use p.
    is_empty = torch.zeros(count, dtype=torch.float64, device=device).index_add(0, rows, weights) == 0
    return KeptTokens(rows, ids, torch.where(is_empty[rows], p, weights).log())
