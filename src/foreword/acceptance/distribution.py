"""Second half of the sampling pipeline: temperature, top-k, top-p and min-p as one threshold per row; sampling.

Each filter keeps the largest logits of a row, so all filters together are one threshold, the row's *floor*. The
distribution of the row is softmax(logit / temperature) over the *kept* tokens: those with logits at or above the
floor. Equal logits are kept or cut together, so that nothing depends on vocabulary order. At temperature 0 the floor is
the largest logit. Sums are sums of integers, so a row's floor does not depend on the other rows of the batch.

The sampled token of a row is the kept token with the largest logit / temperature + Gumbel noise. This needs no
normaliser, so the token depends only on the row's logits and its noise key.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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


class RowParams(NamedTuple):
    """Sampling parameters of every row. They are on the host, so that the code can branch on them without waiting."""

    temperature: Tensor  # float64 [rows]
    top_k: Tensor  # int64 [rows]; the vocabulary size if unlimited
    top_p: Tensor  # float64 [rows]
    min_p: Tensor  # float64 [rows]

    @staticmethod
    def of(judged: Judgement) -> "RowParams":
        columns = [judged.per_row(name) for name in ("temperature", "top_k", "top_p", "min_p")]
        return RowParams(*map(torch.from_numpy, columns))

    def keeps_all(self, vocab_size: int) -> bool:
        """Return whether no filter applies to any sampled row; greedy rows need no floor."""
        filtered = (self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0)
        return not bool((filtered & (self.temperature != 0)).any())

    def on(self, device: torch.device) -> "RowParams":
        """Return a copy on the device."""
        return RowParams(*(uploaded(column, device) for column in self))


@dataclass(frozen=True)
class Distributions:
    """The distribution of each row: softmax((logit - peak) / temperature) over logits >= floor."""

    logits: Tensor  # float32 [rows, vocab], corrected
    peak: Tensor  # float32 [rows], largest logit; 0 if none is finite
    floor: Tensor  # float32 [rows], smallest kept logit; inf if none is kept
    temperature: Tensor  # float64 [rows], 1 for greedy rows
    greedy_token: Tensor  # int64 [rows], the argmax of a greedy row; NO_TOKEN for sampled rows
    status: Tensor  # int64 [rows], RowStatus
    sampler: native.NativeSampler = None  # native sampler for these rows; None: torch


def distributions(judged: Judgement) -> Distributions:
    """Run the whole sampling pipeline on a batch, up to sampling."""
    return shape_rows(corrected_logits(judged), RowParams.of(judged), judged.sampler)


def shape_rows(logits: Tensor, params: RowParams, sampler: native.NativeSampler) -> Distributions:
    """Return the distributions of corrected logits; a native `sampler`, if any, computes the floors."""
    if sampler is None:
        peak, floor, first = floors(logits, params)
    else:
        peak, floor, first = native.floors(sampler, logits, *params)
    temperature = uploaded(params.temperature, logits.device)
    greedy, finite = temperature == 0, peak.isfinite()
    broken = peak.isnan() | (peak == torch.inf)
    status = torch.where(broken, int(RowStatus.NOT_FINITE), int(RowStatus.OK))
    return Distributions(
        logits,
        peak=torch.where(finite, peak, 0.0),
        floor=torch.where(finite, floor, torch.inf),
        temperature=torch.where(greedy, 1.0, temperature),
        greedy_token=torch.where(greedy & finite, first, NO_TOKEN),
        status=torch.where(peak == -torch.inf, int(RowStatus.ALL_MASKED), status),
        sampler=sampler,
    )


def floors(logits: Tensor, params: RowParams) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit, the smallest kept logit, and the first id of the largest logit, all [rows].

    It uses torch operations on any device, and never waits for the device: which filters run depends on `params` alone.
    If a row has NaN, its largest logit is NaN.
    """
    peak, first = logits.max(dim=-1)
    on_device, sampled = params.on(logits.device), params.temperature != 0
    floor = torch.where(on_device.temperature == 0, peak, LOWEST)
    top_k_rows = torch.nonzero(sampled & (params.top_k < logits.shape[1])).flatten()
    if len(top_k_rows):
        rows = uploaded(top_k_rows, logits.device)
        largest = logits[rows].topk(int(params.top_k[top_k_rows].max()), dim=-1).values
        floor[rows] = largest.gather(1, on_device.top_k[rows, None] - 1).flatten().clamp(min=LOWEST)
    top_p_rows = torch.nonzero(sampled & (params.top_p < 1)).flatten()
    if len(top_p_rows):
        rows = uploaded(top_p_rows, logits.device)
        row_params = (floor[rows], on_device.temperature[rows], on_device.top_p[rows])
        floor[rows] = nucleus_floor(logits[rows], peak[rows], *row_params)
    # weight = exp((logit - peak) / temperature) is at least min_p if the logit is at least this:
    min_p_floor = (peak.double() + on_device.temperature * on_device.min_p.log()).float()
    return peak, torch.where(on_device.min_p > 0, torch.maximum(floor, min_p_floor), floor), first


FIXED_POINT_ONE = float(1 << 40)
"""The weight of the most likely token as an integer. Sums over vocabularies of up to 4 million fit into int64."""

SLACK = 1 - 1e-6
"""Factor that lowers the bound of `nucleus_floor` by more than its rounding error, so that no candidate is missed."""


def nucleus_floor(logits: Tensor, peak: Tensor, floor: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest logit of each row's top-p nucleus, [rows]; only logits at or above `floor` count."""
    scaled = (logits - peak[:, None]) * (1 / temperature).float()[:, None]
    weights = (scaled.exp_() * FIXED_POINT_ONE).round_().long()  # [rows, vocab]
    weights = torch.where(logits >= floor[:, None], weights, 0)
    total = weights.sum(dim=-1)
    # A token with a weight below (1 - top_p) * total / vocabulary cannot be in the nucleus.
    least = ((1 - top_p) * total.double() * (SLACK / logits.shape[1])).floor().long().clamp(min=1)
    candidate = weights >= least[:, None]
    values, ids = logits.masked_fill(~candidate, -torch.inf).topk(most_candidates(candidate), dim=-1)
    weights = torch.where(values > -torch.inf, weights.gather(1, ids), 0)  # [rows, candidates]
    kept = mass_above(values, weights).double() < (top_p * total.double())[:, None]
    return torch.where(kept & (weights > 0), values, torch.inf).amin(dim=-1)


def most_candidates(candidate: Tensor) -> int:
    """Return the number of candidates to sort per row: on a CPU, the largest number that a row has.

    On a GPU, return the vocabulary size, because reading that number would wait for the device.
    """
    if not placement_of(candidate.device).is_host:
        return candidate.shape[1]
    return max(1, int(candidate.sum(dim=-1).max()))


def mass_above(values: Tensor, weights: Tensor) -> Tensor:
    """Return, for each entry of rows sorted by falling value, the total weight of strictly larger values."""
    weight_before = weights.cumsum(dim=-1) - weights
    # Whether the entry is the first of several equal values
    is_first = torch.ones_like(values, dtype=torch.bool)
    is_first[:, 1:] = values[:, 1:] != values[:, :-1]
    index = torch.arange(values.shape[1], device=values.device)
    return weight_before.gather(1, torch.where(is_first, index, 0).cummax(dim=-1).values)


@dataclass(frozen=True)
class KeptTokens:
    """The kept tokens of some rows, one after another, sorted by row and id."""

    rows: Tensor  # int64 [tokens], row of each token
    ids: Tensor  # int64 [tokens]
    log_weights: Tensor  # float64 [tokens], unnormalised log probability: (logit - peak) / temperature


def kept_tokens(shaped: Distributions, rows: Tensor) -> KeptTokens:
    """Return the kept tokens of these rows (int64, ascending)."""
    index, ids = torch.nonzero(shaped.logits[rows] >= shaped.floor[rows, None], as_tuple=True)
    kept = KeptTokens(rows[index], ids, log_weights(shaped, rows[index], ids))
    is_possible = kept.log_weights > -torch.inf
    return KeptTokens(kept.rows[is_possible], kept.ids[is_possible], kept.log_weights[is_possible])


def log_weights(shaped: Distributions, rows: Tensor, ids: Tensor) -> Tensor:
    """Return unnormalised log probabilities of (row, id) pairs; -inf for tokens that are not kept."""
    logits, greedy = shaped.logits[rows, ids], shaped.greedy_token[rows]
    scaled = (logits.double() - shaped.peak[rows].double()) / shaped.temperature[rows]
    is_kept = (logits >= shaped.floor[rows]) & (logits < torch.inf) & ((greedy == NO_TOKEN) | (greedy == ids))
    return torch.where(is_kept, scaled, -torch.inf)


def sample(logits: Tensor, params: RowParams, keys: Keys) -> Tensor:
    """Sample a token for each row, on any device; return the tokens and their RowStatus, int64 [2, rows].

    Never waits for the device.
    """
    if (kernel := placement_of(logits.device).draw_rows) is not None:
        return _draw_by(kernel, logits, params, keys)
    shaped = shape_rows(logits, params, None)
    if not bool(params.temperature.any()):
        return torch.stack([shaped.greedy_token, shaped.status])
    return torch.stack([draw(shaped, keys), shaped.status])


def draw(shaped: Distributions, keys: Keys) -> Tensor:
    """Return the sampled token of each row, int64 [rows]; NO_TOKEN if no token is kept."""
    device = shaped.logits.device
    noise_keys, placement = uploaded(key_tensor(keys), device), placement_of(device)
    if shaped.sampler is not None:
        columns = (shaped.logits, shaped.peak, shaped.floor, shaped.temperature, shaped.greedy_token)
        return native.draw(shaped.sampler, *columns, noise_keys)
    if placement.is_host:
        return best_per_row(kept_tokens(shaped, torch.arange(len(shaped.logits))), noise_keys)
    if placement.draw_rows is not None:
        largest = placement.draw_rows(shaped.logits, shaped.temperature, noise_keys, shaped.floor)[0]
        return torch.where(shaped.greedy_token != NO_TOKEN, shaped.greedy_token, largest)
    return best_of_all(shaped, noise_keys)


def _draw_by(kernel: Callable[..., Tensor], logits: Tensor, params: RowParams, keys: Keys) -> Tensor:
    """Return the same as `sample`, computed by the device's kernel."""
    # One upload for both columns: the temperatures travel as the bits of int64.
    columns = uploaded(torch.stack([params.temperature.view(torch.int64), key_tensor(keys)]), logits.device)
    floor = None if params.keeps_all(logits.shape[1]) else floors(logits, params)[1]
    samples = bool(params.temperature.any())
    return kernel(logits, columns[0].view(torch.float64), columns[1], floor, samples=samples)


def best_of_all(shaped: Distributions, noise_keys: Tensor) -> Tensor:
    """Return the same as `best_per_row`, int64 [rows], but compute it over the whole vocabulary.

    On a device this needs no waiting; `best_per_row` would wait for the number of kept tokens.
    """
    ids = torch.arange(shaped.logits.shape[1], device=shaped.logits.device)
    distance = shaped.logits.double() - shaped.peak.double()[:, None]
    scores = distance / shaped.temperature[:, None] + gumbel(noise_keys[:, None], ids)
    kept = (shaped.logits >= shaped.floor[:, None]) & (shaped.logits < torch.inf)
    best, token = torch.where(kept, scores, -torch.inf).max(dim=-1)
    return torch.where(
        shaped.greedy_token != NO_TOKEN, shaped.greedy_token, torch.where(best > -torch.inf, token, NO_TOKEN)
    )


def best_per_row(kept: KeptTokens, noise_keys: Tensor) -> Tensor:
    """Return each row's id with the largest log weight + noise, int64 [rows]; on ties, the lowest id.

    `noise_keys` has one key per row of the batch. A row without kept tokens gets NO_TOKEN.
    """
    scores = kept.log_weights + gumbel(noise_keys[kept.rows], kept.ids)
    best = torch.full(noise_keys.shape, -torch.inf, dtype=torch.float64, device=scores.device)
    best = best.scatter_reduce(0, kept.rows, scores, "amax")
    is_best = (scores == best[kept.rows]) & (scores > -torch.inf)
    unset = torch.iinfo(torch.int64).max
    token = torch.full(noise_keys.shape, unset, device=scores.device)
    token = token.scatter_reduce(0, kept.rows[is_best], kept.ids[is_best], "amin")
    return torch.where(token == unset, NO_TOKEN, token)
