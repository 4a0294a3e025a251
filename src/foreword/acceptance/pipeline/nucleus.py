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
    candidate = weights >= least[:, None]
    values, ids = logits.masked_fill(~candidate, -torch.inf).topk(most_candidates(candidate), dim=-1)
    weights = torch.where(values > -torch.inf, weights.gather(1, ids), 0)  # [rows, candidates]
    kept = mass_above(values, weights).double() < (top_p * total.double())[:, None]
    return torch.where(kept & (weights > 0), values, torch.inf).amin(dim=-1)


def most_candidates(candidate: Tensor) -> int:
    """How many of a row to sort: what the fullest row has. A device is not asked, as that would mean to wait for it."""
    if candidate.device.type != "cpu":
        return candidate.shape[1]
    return max(1, int(candidate.sum(dim=-1).max()))


def mass_above(values: Tensor, weights: Tensor) -> Tensor:
    """For rows of falling values, at each the weight of the row's entries of strictly larger value."""
    before = weights.cumsum(dim=-1) - weights
    first = torch.ones_like(values, dtype=torch.bool)  # of its equals
    first[:, 1:] = values[:, 1:] != values[:, :-1]
    place = torch.arange(values.shape[1], device=values.device)
    return before.gather(1, torch.where(first, place, 0).cummax(dim=-1).values)
