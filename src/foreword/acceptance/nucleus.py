"""Top-p without sorting the vocabulary.

A token is kept if the tokens with a larger logit have less than top_p of the mass. All but at most `vocab` tokens'
worth of mass lies above it then, so its own weight is at least (1 - top_p) * total / vocab: only tokens that
reach this bound are sorted. It is exact for every distribution; a flat one merely has more candidates.

Weights are integers, relative to the row's largest: their sums are exact, so they are the same in any order.
"""

import torch
from torch import Tensor

ONE = float(1 << 40)
"""The weight of the most likely token. Sums over a vocabulary of up to 4 million stay in int64."""

SLACK = 1 - 1e-6
"""Lowers the candidate bound by far more than it can be rounded; it only ever admits more candidates."""


def nucleus_floor(logits: Tensor, peak: Tensor, floor: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """[rows], the smallest logit in each row's nucleus among the tokens that reach `floor`."""
    scaled = (logits - peak[:, None]) * (1 / temperature).float()[:, None]
    weights = (scaled.exp_() * ONE).round_().long()  # [rows, vocab]
    weights = torch.where(logits >= floor[:, None], weights, 0)
    total = weights.sum(dim=-1)
    least = ((1 - top_p) * total.double() * (SLACK / logits.shape[1])).floor().long().clamp(min=1)
    rows, ids = torch.nonzero(weights >= least[:, None], as_tuple=True)
    values, weights = logits[rows, ids], weights[rows, ids]
    order = torch.argsort(values, descending=True, stable=True)
    order = order[torch.argsort(rows[order], stable=True)]  # by row, then from the largest logit down
    rows, values, weights = rows[order], values[order], weights[order]
    kept = mass_above(rows, values, weights).double() < (top_p * total.double())[rows]
    return torch.full_like(peak, torch.inf).scatter_reduce(0, rows[kept], values[kept], "amin")


def mass_above(rows: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """For entries sorted by row and falling value, the weight of the row's entries of strictly larger value."""
    before = weights.cumsum(0) - weights
    place = torch.arange(len(rows), device=rows.device)
    new_row = torch.ones_like(rows, dtype=torch.bool)
    new_row[1:] = rows[1:] != rows[:-1]
    new_value = new_row.clone()
    new_value[1:] |= values[1:] != values[:-1]
    row_start = torch.where(new_row, place, 0).cummax(0).values
    value_start = torch.where(new_value, place, 0).cummax(0).values
    return before[value_start] - before[row_start]
