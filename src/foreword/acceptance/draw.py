"""Samples one token per row: the largest logit / temperature + Gumbel noise among the kept tokens.

No normaliser is needed, so a row's token depends only on the row's logits and its key.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.acceptance.distribution import Distributions, RowShape, floors, shape_rows
from foreword.acceptance.noise import Keys, gumbel, key_tensor
from foreword.acceptance.rules.trees import NO_TOKEN
from foreword.acceptance.transfer import uploaded
from foreword.kernels import sampler as native
from foreword.kernels.placement import placement_of


@dataclass(frozen=True)
class Kept:
    """The kept tokens of some rows, ragged, sorted by row and id."""

    rows: Tensor  # int64 [tokens]
    ids: Tensor  # int64 [tokens]
    log_weights: Tensor  # float64 [tokens], (logit - peak) / temperature


def kept_tokens(shaped: Distributions, rows: Tensor) -> Kept:
    """Return the kept tokens of these rows (int64, ascending)."""
    slot, ids = torch.nonzero(shaped.logits[rows] >= shaped.floor[rows, None], as_tuple=True)
    kept = Kept(rows[slot], ids, log_weights(shaped, rows[slot], ids))
    alive = kept.log_weights > -torch.inf
    return Kept(kept.rows[alive], kept.ids[alive], kept.log_weights[alive])


def log_weights(shaped: Distributions, rows: Tensor, ids: Tensor) -> Tensor:
    """Return unnormalised log probabilities of (row, id) pairs; -inf for tokens that are not kept."""
    logits, only = shaped.logits[rows, ids], shaped.only[rows]
    scaled = (logits.double() - shaped.peak[rows].double()) / shaped.temperature[rows]
    keep = (logits >= shaped.floor[rows]) & (logits < torch.inf) & ((only == NO_TOKEN) | (only == ids))
    return torch.where(keep, scaled, -torch.inf)


def sample(logits: Tensor, shape: RowShape, keys: Keys) -> Tensor:
    """int64 [2, rows], each row's sampled token and its RowStatus; in torch, for any device.

    Never waits for the device.
    """
    if (kernel := placement_of(logits.device).draw_rows) is not None:
        return _draw_by(kernel, logits, shape, keys)
    shaped = shape_rows(logits, shape, None)
    if not bool(shape.temperature.any()):
        return torch.stack([shaped.only, shaped.status])
    return torch.stack([draw(shaped, keys), shaped.status])


def draw(shaped: Distributions, keys: Keys) -> Tensor:
    """int64 [rows], each row's sampled token; NO_TOKEN if the row has none."""
    device = shaped.logits.device
    noise_keys, placement = uploaded(key_tensor(keys), device), placement_of(device)
    if shaped.sampler is not None:
        columns = (shaped.logits, shaped.peak, shaped.floor, shaped.temperature, shaped.only)
        return native.draw(shaped.sampler, *columns, noise_keys)
    if placement.is_host:
        return best_per_row(kept_tokens(shaped, torch.arange(len(shaped.logits))), noise_keys)
    if placement.draw_rows is not None:
        largest = placement.draw_rows(shaped.logits, shaped.temperature, noise_keys, shaped.floor)[0]
        return torch.where(shaped.only != NO_TOKEN, shaped.only, largest)
    return best_of_all(shaped, noise_keys)


def _draw_by(kernel: Callable[..., Tensor], logits: Tensor, shape: RowShape, keys: Keys) -> Tensor:
    """Run `sample` with a device's own kernel, copying the parameters once."""
    columns = uploaded(torch.stack([shape.temperature.view(torch.int64), key_tensor(keys)]), logits.device)
    floor = None if shape.keeps_all(logits.shape[1]) else floors(logits, shape)[1]
    samples = bool(shape.temperature.any())
    return kernel(logits, columns[0].view(torch.float64), columns[1], floor, samples=samples)


def best_of_all(shaped: Distributions, noise_keys: Tensor) -> Tensor:
    """int64 [rows], like `best_per_row`, but computed over all tokens.

    For devices, where counting the kept tokens would require waiting.
    """
    ids = torch.arange(shaped.logits.shape[1], device=shaped.logits.device)
    distance = shaped.logits.double() - shaped.peak.double()[:, None]
    scores = distance / shaped.temperature[:, None] + gumbel(noise_keys[:, None], ids)
    kept = (shaped.logits >= shaped.floor[:, None]) & (shaped.logits < torch.inf)
    best, token = torch.where(kept, scores, -torch.inf).max(dim=-1)
    return torch.where(shaped.only != NO_TOKEN, shaped.only, torch.where(best > -torch.inf, token, NO_TOKEN))


def best_per_row(kept: Kept, noise_keys: Tensor) -> Tensor:
    """int64 [rows], the id with the largest log weight + noise, the lowest on ties; one key per row."""
    scores = kept.log_weights + gumbel(noise_keys[kept.rows], kept.ids)
    best = torch.full(noise_keys.shape, -torch.inf, dtype=torch.float64, device=scores.device)
    best = best.scatter_reduce(0, kept.rows, scores, "amax")
    winner = (scores == best[kept.rows]) & (scores > -torch.inf)
    last = torch.iinfo(torch.int64).max
    token = torch.full(noise_keys.shape, last, device=scores.device)
    token = token.scatter_reduce(0, kept.rows[winner], kept.ids[winner], "amin")
    return torch.where(token == last, NO_TOKEN, token)
