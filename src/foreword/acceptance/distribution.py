"""Second half of the sampling pipeline: temperature, top-k, top-p and min-p, as one threshold per row.

Each filter keeps the largest logits, so together they are a floor: a row's distribution is softmax(logit /
temperature) over logits at or above it. Equal logits are kept or cut together, so that nothing depends on vocabulary
order. At temperature 0 the floor is the largest logit. No float sum is involved: a row's floor does not depend on the
rest of the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement, RowStatus
from foreword.acceptance.corrections import corrected_logits
from foreword.acceptance.rules.trees import NO_TOKEN
from foreword.acceptance.transfer import uploaded
from foreword.kernels import sampler as native
from foreword.kernels.placement import placement_of

LOWEST = torch.finfo(torch.float32).min
"""Lowest finite logit; masked logits (-inf) are below it."""


@dataclass(frozen=True)
class RowShape:
    """Sampling parameters of every row, on the host, so that decisions need no device access."""

    temperature: Tensor  # float64 [rows]
    top_k: Tensor  # int64 [rows]; the vocabulary size if unlimited
    top_p: Tensor  # float64 [rows]
    min_p: Tensor  # float64 [rows]

    @staticmethod
    def of(judged: Judgement) -> "RowShape":
        """Return the parameters of each row's request."""
        columns = [judged.per_row(name) for name in ("temperature", "top_k", "top_p", "min_p")]
        return RowShape(*map(torch.from_numpy, columns))

    def keeps_all(self, vocab_size: int) -> bool:
        """Whether no sampled row has a filter."""
        filtered = (self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0)
        return not bool((filtered & (self.temperature != 0)).any())

    def on(self, device: torch.device) -> "RowShape":
        """Return a copy on a device."""
        columns = (self.temperature, self.top_k, self.top_p, self.min_p)
        return RowShape(*(uploaded(column, device) for column in columns))


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
    """Run the whole pipeline on all rows."""
    return shape_rows(corrected_logits(judged), RowShape.of(judged), judged.sampler)


def shape_rows(logits: Tensor, shape: RowShape, sampler: native.NativeSampler) -> Distributions:
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


def floors(logits: Tensor, shape: RowShape) -> tuple[Tensor, Tensor, Tensor]:
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
    """[rows], the smallest logit in each row's nucleus, among tokens at or above `floor`."""
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
