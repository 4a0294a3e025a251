"""The native sampler: floors of rows, and draws. The torch code in `acceptance` is what it must equal."""

import os
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.kernels.native import choose_threads, native_status
from foreword.kernels.placement import placement_of

if TYPE_CHECKING:
    from foreword.kernels._native import Sampler


NativeSampler: TypeAlias = "Sampler | None"
"""The compiled one; None: torch does its work."""


DraftedRows: TypeAlias = tuple[list[int], list[int]]
"""Per row the row before it, -1 at the ends of texts, and its draft token, below 0 if it is not known yet."""


@cache
def native_sampler() -> NativeSampler:
    """The compiled sampler with a thread per core, or None where the extension was not built."""
    if not native_status().available:
        return None
    from foreword.kernels._native import Sampler

    return Sampler(choose_threads())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=native_sampler.cache_clear)  # its threads stay with the parent


def sampler_for(logits: Tensor) -> NativeSampler:
    """The native sampler if it can take these rows: float32 on the CPU, each row in one piece."""
    fits = placement_of(logits.device).is_host and logits.dtype == torch.float32 and logits.stride(-1) == 1
    return native_sampler() if fits else None


def floors(
    sampler: "Sampler", logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Per row the largest logit (NaN if any is), the smallest kept one, and a greedy row's first largest id."""
    rows = len(logits)
    peak, floor, first = torch.empty(rows), torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    columns = (logits, temperature, top_k, top_p, min_p, peak, floor, first)
    sampler.floors(*(column.numpy() for column in columns))
    return peak, floor, first


def draw(
    sampler: "Sampler",
    logits: Tensor,
    peak: Tensor,
    floor: Tensor,
    temperature: Tensor,
    only: Tensor,
    keys: Tensor,
) -> Tensor:
    """int64 [rows], the token that each row draws with its key; -1 where it keeps none."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    columns = (logits, peak, floor, temperature, only, keys, tokens)
    sampler.draw(*(column.numpy() for column in columns))
    return tokens


def sample(
    sampler: "Sampler",
    logits: Tensor,
    records: npt.NDArray[np.void],
    positions: npt.NDArray[np.int64],
    drafted: DraftedRows | None = None,
) -> npt.NDArray[np.int64]:
    """int64 [2, rows], keys, `floors` and `draw` in one call: each row's token (-1: it has none) and RowStatus.

    Records are per row, with the fields named here; positions are those of the tokens that the rows are about. With
    `drafted` only those rows are drawn from whose draft tokens were all drawn; the others have no token.
    """
    rows = logits.numpy()
    found = np.empty((2, len(rows)), np.int64)
    sampler.sample(
        rows,
        records["temperature"],
        records["top_k"],
        records["top_p"],
        records["min_p"],
        records["stem"],
        positions,
        found[0],
        found[1],
        drafted,
    )
    return found
