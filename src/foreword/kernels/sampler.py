"""The compiled sampler: the smallest logit that a row keeps (its floor), and draws; `acceptance` has the reference."""

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
"""For each row its parent row (-1 at the end of a text) and its draft token (negative if it is not known yet)."""


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
    """Return the compiled sampler if it supports these rows: float32, on the CPU, each row contiguous."""
    is_supported = (
        placement_of(logits.device).is_host and logits.dtype == torch.float32 and logits.stride(-1) == 1
    )
    return native_sampler() if is_supported else None


def floors(
    sampler: "Sampler", logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three columns: each row's largest logit (NaN if one is), its smallest kept logit, and its greedy token.

    The greedy token is the first argmax at temperature 0, else -1.
    """
    rows = len(logits)
    peak, floor = torch.empty(rows), torch.empty(rows)
    greedy_token = torch.empty(rows, dtype=torch.int64)
    columns = (logits, temperature, top_k, top_p, min_p, peak, floor, greedy_token)
    sampler.floors(*(column.numpy() for column in columns))
    return peak, floor, greedy_token


def draw(
    sampler: "Sampler",
    logits: Tensor,
    peak: Tensor,
    floor: Tensor,
    temperature: Tensor,
    greedy_token: Tensor,
    keys: Tensor,
) -> Tensor:
    """Return each row's sampled token, int64 [rows]; -1 if none is kept.

    The arguments are columns, [rows]; a row with a `greedy_token` >= 0 gets that token.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64)
    columns = (logits, peak, floor, temperature, greedy_token, keys, tokens)
    sampler.draw(*(column.numpy() for column in columns))
    return tokens


def sample(
    sampler: "Sampler",
    logits: Tensor,
    records: npt.NDArray[np.void],
    positions: npt.NDArray[np.int64],
    drafted: DraftedRows | None = None,
) -> npt.NDArray[np.int64]:
    """Sample rows in one call: noise keys, `floors` and `draw`. Return each row's token and RowStatus, int64 [2, rows].

    `records` [rows] have the sampling parameters, `positions` [rows] are those of the predicted tokens. A token is -1
    if none is kept. With `drafted`, rows after a draft token that was not sampled are skipped and have the token -1.
    """
    rows = logits.numpy()
    results = np.empty((2, len(rows)), np.int64)
    sampler.sample(
        rows,
        records["temperature"],
        records["top_k"],
        records["top_p"],
        records["min_p"],
        records["stem"],
        positions,
        results[0],
        results[1],
        drafted,
    )
    return results
