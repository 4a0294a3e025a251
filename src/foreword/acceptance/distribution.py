"""Second half of the sampling pipeline: temperature, top-k, top-p and min-p as one threshold per row, and draws.

Each filter keeps the largest logits, so together they are a floor: a row's distribution is softmax(logit /
temperature) over logits at or above it. Equal logits are kept or cut together, so that nothing depends on vocabulary
order. At temperature 0 the floor is the largest logit. No float sum is involved: a row's floor does not depend on the
rest of the batch.

A row's token is the kept token with the largest logit / temperature + Gumbel noise. No normaliser is needed, so it
depends only on the row's logits and its key.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement, RowStatus
from foreword.acceptance.corrections import corrected_logits
from foreword.acceptance.noise import Keys, gumbel, key_tensor
from foreword.acceptance.rules.trees import NO_TOKEN
from foreword.acceptance.transfer import uploaded
from foreword.kernels import sampler as native
from foreword.kernels.placement import placement_of

LOWEST = torch.finfo(torch.float32).min
"""Lowest finite logit; masked logits (-inf) are below it."""


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of every row, on the host, so that decisions need no device access."""

    temperature: Tensor  # float64 [rows]
    top_k: Tensor  # int64 [rows]; the vocabulary size if unlimited
    top_p: Tensor  # float64 [rows]
    min_p: Tensor  # float64 [rows]

    @staticmethod
    def of(judged: Judgement) -> "RowParams":
        columns = [judged.per_row(name) for name in ("temperature", "top_k", "top_p", "min_p")]
        return RowParams(*map(torch.from_numpy, columns))

    def keeps_all(self, vocab_size: int) -> bool:
        filtered = (self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0)
        return not bool((filtered & (self.temperature != 0)).any())

    def on(self, device: torch.device) -> "RowParams":
        columns = (self.temperature, self.top_k, self.top_p, self.min_p)
        return RowParams(*(uploaded(column, device) for column in columns))


@dataclass(frozen=True)
class Distributions:
    """Distribution of each row: softmax((logit - peak) / temperature) over logits >= floor."""

    logits: Tensor  # float32 [rows, vocab], corrected
    peak: Tensor  # float32 [rows], largest logit; 0 if none is finite
    floor: Tensor  # float32 [rows], smallest kept logit; inf if none is kept
    temperature: Tensor  # float64 [rows], 1 for greedy rows
    only: Tensor  # int64 [rows], the argmax of a greedy row; NO_TOKEN otherwise
    status: Tensor  # int64 [rows], RowStatus
    sampler: native.NativeSampler = None  # native sampler for these rows; None: torch


def distributions(judged: Judgement) -> Distributions:
    return shape_rows(corrected_logits(judged), RowParams.of(judged), judged.sampler)


def shape_rows(logits: Tensor, shape: RowParams, sampler: native.NativeSampler) -> Distributions:
    """Compute every row's floor, natively if the sampler supports these rows."""
    if sampler is None:
        peak, floor, first = floors(logits, shape)
    else:
        columns = (shape.temperature, shape.top_k, shape.top_p, shape.min_p)
        peak, floor, first = native.floors(sampler, logits, *columns)
    temperature = uploaded(shape.temperature, logits.device)
    greedy, finite = temperature == 0, peak.isfinite()
    broken = peak.isnan() | (peak == torch.inf)
    status = torch.where(broken, int(RowStatus.NOT_FINITE), int(RowStatus.OK))
    return Distributions(
        logits,
        peak=torch.where(finite, peak, 0.0),
        floor=torch.where(finite, floor, torch.inf),
        temperature=torch.where(greedy, 1.0, temperature),
        only=torch.where(greedy & finite, first, NO_TOKEN),
        status=torch.where(peak == -torch.inf, int(RowStatus.ALL_MASKED), status),
        sampler=sampler,
    )


def floors(logits: Tensor, shape: RowParams) -> tuple[Tensor, Tensor, Tensor]:
    """Return per row the largest logit, the smallest kept logit, and the first id of the largest; in torch,
    for any device. NaN in a row makes its largest logit NaN. Never waits for the device: the parameters
    alone decide which filters run."""
    peak, first = logits.max(dim=-1)
    there, sampled = shape.on(logits.device), shape.temperature != 0
    floor = torch.where(there.temperature == 0, peak, LOWEST)
    limited = torch.nonzero(sampled & (shape.top_k < logits.shape[1])).flatten()
    if len(limited):
        rows = uploaded(limited, logits.device)
        largest = logits[rows].topk(int(shape.top_k[limited].max()), dim=-1).values
        floor[rows] = largest.gather(1, there.top_k[rows, None] - 1).flatten().clamp(min=LOWEST)
    limited = torch.nonzero(sampled & (shape.top_p < 1)).flatten()
    if len(limited):
        rows = uploaded(limited, logits.device)
        own = (floor[rows], there.temperature[rows], there.top_p[rows])
        floor[rows] = nucleus_floor(logits[rows], peak[rows], *own)
    relative = (peak.double() + there.temperature * there.min_p.log()).float()
    return peak, torch.where(there.min_p > 0, torch.maximum(floor, relative), floor), first


ONE = float(1 << 40)
"""Integer weight of the most likely token; sums over vocabularies of up to 4 million fit into int64."""

SLACK = 1 - 1e-6
"""Lowers the bound of `nucleus_floor` by more than its rounding error, so that no candidate is missed."""


def nucleus_floor(logits: Tensor, peak: Tensor, floor: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest logit in each row's nucleus, [rows], among tokens at or above `floor`."""
    scaled = (logits - peak[:, None]) * (1 / temperature).float()[:, None]
    weights = (scaled.exp_() * ONE).round_().long()  # [rows, vocab]
    weights = torch.where(logits >= floor[:, None], weights, 0)
    total = weights.sum(dim=-1)
    # A token lighter than (1 - top_p) * total / vocabulary cannot be in the nucleus.
    least = ((1 - top_p) * total.double() * (SLACK / logits.shape[1])).floor().long().clamp(min=1)
    candidate = weights >= least[:, None]
    values, ids = logits.masked_fill(~candidate, -torch.inf).topk(most_candidates(candidate), dim=-1)
    weights = torch.where(values > -torch.inf, weights.gather(1, ids), 0)  # [rows, candidates]
    kept = mass_above(values, weights).double() < (top_p * total.double())[:, None]
    return torch.where(kept & (weights > 0), values, torch.inf).amin(dim=-1)


def most_candidates(candidate: Tensor) -> int:
    """Return the number of candidates to sort per row: on a CPU the most that any row has; on a
    GPU the whole vocabulary, since asking would wait for the device."""
    if not placement_of(candidate.device).is_host:
        return candidate.shape[1]
    return max(1, int(candidate.sum(dim=-1).max()))


def mass_above(values: Tensor, weights: Tensor) -> Tensor:
    """For rows sorted by falling value, return the weight of strictly larger values at each entry."""
    before = weights.cumsum(dim=-1) - weights
    first = torch.ones_like(values, dtype=torch.bool)  # whether it is the first of equal values
    first[:, 1:] = values[:, 1:] != values[:, :-1]
    place = torch.arange(values.shape[1], device=values.device)
    return before.gather(1, torch.where(first, place, 0).cummax(dim=-1).values)


@dataclass(frozen=True)
class KeptTokens:
    """The kept tokens of some rows, ragged, sorted by row and id."""

    rows: Tensor  # int64 [tokens]
    ids: Tensor  # int64 [tokens]
    log_weights: Tensor  # float64 [tokens], (logit - peak) / temperature


def kept_tokens(shaped: Distributions, rows: Tensor) -> KeptTokens:
    """Return the kept tokens of these rows (int64, ascending)."""
    slot, ids = torch.nonzero(shaped.logits[rows] >= shaped.floor[rows, None], as_tuple=True)
    kept = KeptTokens(rows[slot], ids, log_weights(shaped, rows[slot], ids))
    alive = kept.log_weights > -torch.inf
    return KeptTokens(kept.rows[alive], kept.ids[alive], kept.log_weights[alive])


def log_weights(shaped: Distributions, rows: Tensor, ids: Tensor) -> Tensor:
    """Return unnormalised log probabilities of (row, id) pairs; -inf for tokens that are not kept."""
    logits, only = shaped.logits[rows, ids], shaped.only[rows]
    scaled = (logits.double() - shaped.peak[rows].double()) / shaped.temperature[rows]
    keep = (logits >= shaped.floor[rows]) & (logits < torch.inf) & ((only == NO_TOKEN) | (only == ids))
    return torch.where(keep, scaled, -torch.inf)


def sample(logits: Tensor, shape: RowParams, keys: Keys) -> Tensor:
    """Sample a token for each row, on any device; return the tokens and their RowStatus, int64 [2, rows].

    Never waits for the device.
    """
    if (kernel := placement_of(logits.device).draw_rows) is not None:
        return _draw_by(kernel, logits, shape, keys)
    shaped = shape_rows(logits, shape, None)
    if not bool(shape.temperature.any()):
        return torch.stack([shaped.only, shaped.status])
    return torch.stack([draw(shaped, keys), shaped.status])


def draw(shaped: Distributions, keys: Keys) -> Tensor:
    """Return each row's sampled token, int64 [rows]; NO_TOKEN if the row has none."""
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


def _draw_by(kernel: Callable[..., Tensor], logits: Tensor, shape: RowParams, keys: Keys) -> Tensor:
    """Run `sample` with a device's own kernel, copying the parameters once."""
    columns = uploaded(torch.stack([shape.temperature.view(torch.int64), key_tensor(keys)]), logits.device)
    floor = None if shape.keeps_all(logits.shape[1]) else floors(logits, shape)[1]
    samples = bool(shape.temperature.any())
    return kernel(logits, columns[0].view(torch.float64), columns[1], floor, samples=samples)


def best_of_all(shaped: Distributions, noise_keys: Tensor) -> Tensor:
    """Return the same as `best_per_row`, int64 [rows], but compute it over all tokens.

    For devices, where counting the kept tokens would require waiting.
    """
    ids = torch.arange(shaped.logits.shape[1], device=shaped.logits.device)
    distance = shaped.logits.double() - shaped.peak.double()[:, None]
    scores = distance / shaped.temperature[:, None] + gumbel(noise_keys[:, None], ids)
    kept = (shaped.logits >= shaped.floor[:, None]) & (shaped.logits < torch.inf)
    best, token = torch.where(kept, scores, -torch.inf).max(dim=-1)
    return torch.where(shaped.only != NO_TOKEN, shaped.only, torch.where(best > -torch.inf, token, NO_TOKEN))


def best_per_row(kept: KeptTokens, noise_keys: Tensor) -> Tensor:
    """Return the id with the largest log weight + noise, int64 [rows]; the lowest on ties. Each row has one key."""
    scores = kept.log_weights + gumbel(noise_keys[kept.rows], kept.ids)
    best = torch.full(noise_keys.shape, -torch.inf, dtype=torch.float64, device=scores.device)
    best = best.scatter_reduce(0, kept.rows, scores, "amax")
    winner = (scores == best[kept.rows]) & (scores > -torch.inf)
    last = torch.iinfo(torch.int64).max
    token = torch.full(noise_keys.shape, last, device=scores.device)
    token = token.scatter_reduce(0, kept.rows[winner], kept.ids[winner], "amin")
    return torch.where(token == last, NO_TOKEN, token)
