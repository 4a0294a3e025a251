"""Common parts of *token* and *block*: probabilities of draft tokens, and draws from the residual distribution.

*traversal* reads the target's distributions through the same `ChainRows`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.distribution import Distributions, KeptTokens, best_per_row, kept_tokens, log_weights
from foreword.acceptance.noise import Keys, key_tensor
from foreword.acceptance.rules.trees import NO_ROW, DraftTrees, Floats, Ints

ONE = float(1 << 40)


@dataclass(frozen=True)
class ChainRows:
    """Rows of requests whose rule needs q."""

    shaped: Distributions
    trees: DraftTrees
    kept: KeptTokens  # the kept tokens of these rows
    totals: Tensor  # float64 [all rows], sum of the kept weights

    @staticmethod
    def of(shaped: Distributions, trees: DraftTrees, rows: Ints) -> "ChainRows":
        """Select rows of a batch."""
        kept = kept_tokens(shaped, torch.from_numpy(rows).to(shaped.logits.device))
        totals = exact_sums(kept.rows, kept.log_weights.exp(), len(shaped.logits))
        return ChainRows(shaped, trees, kept, totals)

    def target(self, rows: Ints, ids: Ints) -> Floats:
        """float64 [pairs], the target's probability of each id after each row; 0 outside the vocabulary."""
        device = self.shaped.logits.device
        known = (ids >= 0) & (ids < self.shaped.logits.shape[1])
        at = torch.from_numpy(rows).to(device)
        weights = log_weights(self.shaped, at, torch.from_numpy(np.where(known, ids, 0)).to(device)).exp()
        probabilities = torch.where(self.totals[at] > 0, weights / self.totals[at], 0.0)
        return np.where(known, probabilities.cpu().numpy(), 0.0)


def exact_sums(rows: Tensor, weights: Tensor, count: int) -> Tensor:
    """float64 [count], sums of weights in 0 .. 1 per row in 80-bit fixed point, independent of order."""
    high = (weights * ONE).floor()
    low = ((weights * ONE - high) * ONE).round()
    sums = torch.zeros((2, count), dtype=torch.int64, device=rows.device)
    sums = sums.index_add(1, rows, torch.stack([high.long(), low.long()]))
    return (sums[0].double() + sums[1].double() / ONE) / ONE


@dataclass(frozen=True)
class AcceptancePlan:
    """Acceptance probabilities before the uniforms are drawn; only the rule's rows are valid."""

    accept: Floats  # [all rows], acceptance probability of each node
    carried: Floats  # [all rows], share of the target's probability left for an own token after the node


@dataclass(frozen=True)
class Leftover:
    """Residual distribution at the stop rows: max(scale * p - q, 0), normalised."""

    stop_rows: Ints  # [requests]
    scale: Floats  # [requests]
    next_rows: Ints  # [requests], the row whose q is subtracted; NO_ROW: end of the draft, use p


def ratios(chains: ChainRows, nodes: Ints) -> Floats:
    """Return p(x) / q(x) of every node's token x, [all rows]; 0 elsewhere and if q(x) is 0."""
    tokens = chains.trees.tokens
    p, q = chains.target(nodes - 1, tokens[nodes]), chains.trees.q.at(nodes, tokens[nodes])
    ratio = np.zeros(len(tokens))
    ratio[nodes] = np.divide(p, q, out=np.zeros_like(p), where=q > 0)
    return ratio


def next_in_chain(trees: DraftTrees, rows: Ints) -> Ints:
    """Return the next node of each row, [rows]; NO_ROW at the end of a request."""
    ends = trees.row_starts[1:][trees.request_of_row[rows]]
    return np.where(rows + 1 < ends, rows + 1, NO_ROW)


def leftover(trees: DraftTrees, plan: AcceptancePlan, stops: Ints) -> Leftover:
    """Return the distributions of own tokens: the residual after a rejected node, otherwise the target's."""
    next_rows = next_in_chain(trees, stops)
    return Leftover(stops, np.where(next_rows == NO_ROW, 1.0, plan.carried[stops]), next_rows)


def leftover_weights(chains: ChainRows, left: Leftover) -> KeptTokens:
    """Return the kept tokens of the stop rows with their residual log weights."""
    count, device = len(chains.totals), chains.totals.device
    request_at = np.full(count, NO_ROW)
    request_at[left.stop_rows] = np.arange(len(left.stop_rows))
    here = torch.from_numpy(request_at).to(device)[chains.kept.rows] != NO_ROW
    rows, ids = chains.kept.rows[here], chains.kept.ids[here]
    request = request_at[rows.cpu().numpy()]
    p = chains.kept.log_weights[here].exp() / chains.totals[rows]
    q = chains.trees.q.at(left.next_rows[request], ids.cpu().numpy())
    scale, taken = (torch.from_numpy(column).to(device) for column in (left.scale[request], q))
    weights = (scale * p - taken).clamp(min=0)
    # An empty residual means that p and q differ only by rounding: use p.
    empty = torch.zeros(count, dtype=torch.float64, device=device).index_add(0, rows, weights) == 0
    return KeptTokens(rows, ids, torch.where(empty[rows], p, weights).log())


def draw_leftover(chains: ChainRows, left: Leftover, keys: Keys) -> Ints:
    """Return each request's own token, int64 [requests]; the keys are per row of the batch."""
    tokens = best_per_row(leftover_weights(chains, left), key_tensor(keys, chains.totals.device))
    own: Ints = tokens.cpu().numpy()[left.stop_rows]
    return own
