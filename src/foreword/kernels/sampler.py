"""The native sampler: floors of rows, and draws. Its reference is the torch code in `acceptance`."""

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
"""The compiled sampler; None: torch is used."""


DraftedRows: TypeAlias = tuple[list[int], list[int]]
"""Per row its parent row (-1 at text ends) and its draft token (negative if unknown)."""


@cache
def native_sampler() -> NativeSampler:
    """Return the compiled sampler with one thread per core; None if it was not built."""
    if not native_status().available:
        return None
    from foreword.kernels._native import Sampler

    return Sampler(choose_threads())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=native_sampler.cache_clear)  # threads do not survive a fork


def sampler_for(logits: Tensor) -> NativeSampler:
    """Return the native sampler if it supports these rows: float32 on the CPU, contiguous rows."""
    fits = placement_of(logits.device).is_host and logits.dtype == torch.float32 and logits.stride(-1) == 1
    return native_sampler() if fits else None


def floors(
    sampler: "Sampler", logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return per row the largest logit (NaN if any is), the smallest kept one, and a greedy row's argmax."""
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
    """Return each row's sampled token, int64 [rows]; -1 if none is kept."""
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
    """Compute keys, call `floors` and `draw`; return each row's token (-1: none) and RowStatus, int64 [2, rows].

    Records are per row; positions are those of the predicted tokens. With `drafted`, rows after a rejected draft
    token are skipped and have no token.
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
