"""Prepares a head's chains on the device: accepted draft tokens of the pass in flight, positions, slots, noise keys.

The host knows the length of a text only after the verdict. These kernels compute it on the device, so that drafting
starts earlier. `capacity` is the number of requests that an array has space for, including padding.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.launching import kernel


@kernel(do_not_specialize=("max_levels", "capacity"))
def _count_accepted(drawn, first, drafted, draft_indices, out, max_levels, capacity, BLOCK: tl.constexpr):
    request = tl.arange(0, BLOCK)
    is_accepted = request < capacity
    row = tl.load(first + request, mask=is_accepted, other=0)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for level in range(max_levels):
        draft_index = tl.load(draft_indices + request * max_levels + level, mask=is_accepted, other=-1)
        is_accepted = is_accepted & (draft_index >= 0)
        token = tl.load(drafted + draft_index, mask=is_accepted, other=0)
        target_token = tl.load(drawn + row + level, mask=is_accepted, other=-1)
        is_accepted = is_accepted & (tl.maximum(token, 0) == target_token)
        count += is_accepted.to(tl.int32)
    tl.store(out + request, count, mask=request < capacity)


def _block(capacity: int) -> int:
    """Return the block size for `capacity` requests: one of few, so that few variants are compiled."""
    return max(128, triton.next_power_of_2(capacity))


def count_accepted(drawn: Tensor, first: Tensor, drafted: Tensor, draft_indices: Tensor, out: Tensor) -> None:
    """Write to `out` how many leading draft tokens of each request equal the target's draw.

    `drawn` has the target's tokens, those of a request from row `first` on; `drafted` has the draft tokens (both
    int64). `draft_indices`, int32 [requests, levels], are indices into `drafted`; -1: no draft token. `first` and `out`
    are int32 [requests]. A negative draft token could not be sampled; the pass computed token 0 instead.
    """
    capacity, max_levels = draft_indices.shape
    _count_accepted[(1,)](
        drawn, first, drafted, draft_indices, out, max_levels, capacity, BLOCK=_block(capacity)
    )  # fmt: skip


class ChainLevels(NamedTuple):
    """Noise keys, positions and slots of all draft tokens, [levels, requests], and the row before each chain."""

    last: Tensor  # int32 [requests], row, in the head's first pass, of the last token before the chain
    keys: Tensor  # int64, noise keys for sampling
    positions: Tensor  # int32
    slots: Tensor  # int32

    @staticmethod
    def empty(levels: int, capacity: int, device: torch.device) -> "ChainLevels":
        """Return memory for `capacity` requests."""
        small = torch.zeros((2, levels, capacity), dtype=torch.int32, device=device)
        keys = torch.zeros((levels, capacity), dtype=torch.int64, device=device)
        return ChainLevels(torch.zeros(capacity, dtype=torch.int32, device=device), keys, small[0], small[1])


@kernel(do_not_specialize=("capacity", "pages", "page_size", "spare_slot"))
def _compute_chain_levels(
    row_ids, accepted, lengths, steps, ends, stems, tables, last, keys, positions, slots,
    capacity, pages, page_size, spare_slot, BLOCK: tl.constexpr,
):  # fmt: skip
    level = tl.program_id(0)
    request = tl.arange(0, BLOCK)
    mask = request < capacity
    accepted_count = tl.load(accepted + request, mask=mask, other=0)
    position = tl.load(lengths + request, mask=mask, other=0) + accepted_count + level
    stem = tl.load(stems + request, mask=mask, other=0).to(tl.uint64, bitcast=True)
    # The hash of `acceptance.noise.extend_keys`
    key = (stem + 0x9E3779B97F4A7C15) ^ position.to(tl.uint64)
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key = key ^ (key >> 31)
    # The row of the last draft token is not read.
    is_read = mask & (level + 1 < tl.load(steps + request, mask=mask, other=0))
    has_slot = is_read & (position < tl.load(ends + request, mask=mask, other=0))
    page = tl.minimum(position // page_size, pages - 1)
    physical = tl.load(tables + request * pages + page, mask=has_slot, other=0)
    slot = tl.where(has_slot, physical * page_size + position % page_size, spare_slot)
    index = level * capacity + request
    tl.store(keys + index, key.to(tl.int64, bitcast=True), mask=mask)
    tl.store(positions + index, tl.where(is_read, position, 0), mask=mask)
    tl.store(slots + index, slot, mask=mask)
    if level == 0:
        tl.store(last + request, tl.load(row_ids + request, mask=mask, other=0) + accepted_count, mask=mask)


@kernel(do_not_specialize=("capacity", "max_levels"))
def _take_level(
    levels, drawn, keys, positions, slots, cosines, sines, chain, tokens, key, position, prefix_len, slot, cosine, sine,
    capacity, max_levels, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    level = tl.load(levels + request)
    index = level * capacity + request
    token = tl.load(drawn + request)
    tl.store(chain + index, token)
    tl.store(tokens + request, tl.maximum(token, 0))
    newest_position = tl.load(positions + index)
    tl.store(position + request, newest_position)
    tl.store(prefix_len + request, newest_position + 1)
    tl.store(slot + request, tl.load(slots + index))
    tl.store(key + request, tl.load(keys + index + capacity, mask=level + 1 < max_levels, other=0))
    i = tl.arange(0, BLOCK)
    mask = i < HALF
    tl.store(cosine + request * HALF + i, tl.load(cosines + index * HALF + i, mask=mask), mask=mask)
    tl.store(sine + request * HALF + i, tl.load(sines + index * HALF + i, mask=mask), mask=mask)
    tl.store(levels + request, level + 1)


class Level(NamedTuple):
    """Inputs of the head's pass over the newest draft token of every request, and the noise key for the next token."""

    tokens: Tensor  # int64 [requests]
    key: Tensor  # int64, noise key of the next token
    position: Tensor  # int32
    prefix_len: Tensor  # int32, number of positions that the row attends to
    slot: Tensor  # int32
    cosine: Tensor  # float32 [requests, dim / 2]
    sine: Tensor  # float32

    @staticmethod
    def empty(capacity: int, half: int, device: torch.device) -> "Level":
        """Return memory for `capacity` requests."""

        def zeros(dtype: torch.dtype, *more: int) -> Tensor:
            return torch.zeros((capacity, *more), dtype=dtype, device=device)

        return Level(
            tokens=zeros(torch.int64),
            key=zeros(torch.int64),
            position=zeros(torch.int32),
            prefix_len=zeros(torch.int32),
            slot=zeros(torch.int32),
            cosine=zeros(torch.float32, half),
            sine=zeros(torch.float32, half),
        )


def take_level(
    levels: Tensor,
    drawn: Tensor,
    chain_levels: ChainLevels,
    cos_sin: tuple[Tensor, Tensor],
    chain: Tensor,
    into: Level,
) -> None:
    """Store the drawn tokens, int64 [requests], as the next level of the chain, int64 [levels, requests].

    `levels`, int32 [requests], is the index of this level, and is incremented. `into` receives the inputs of the pass
    over the drawn tokens.
    """
    max_levels, capacity = chain.shape
    half = into.cosine.shape[1]
    _take_level[(capacity,)](
        levels, drawn, *chain_levels[1:], *cos_sin, chain, *into, capacity, max_levels,
        HALF=half, BLOCK=triton.next_power_of_2(half),
    )  # fmt: skip


class ChainStarts(NamedTuple):
    """Where the chain of every request starts; all arrays are [requests]."""

    row_ids: Tensor  # int32, row after which the chain begins if the pass in flight accepts no draft token
    accepted: Tensor  # int32, number of draft tokens that the pass in flight accepts
    lengths: Tensor  # int32, text length if the pass in flight accepts no draft token
    steps: Tensor  # int32, tokens to draft; 0: padding
    ends: Tensor  # int32, one past its last reserved KV row
    stems: Tensor  # int64, noise key prefixes


def compute_chain_levels(
    start: ChainStarts, tables: Tensor, page_size: int, spare_slot: int, out: ChainLevels
) -> None:
    """Compute the rows and noise keys of all chains into `out`; the keys are those of `acceptance.noise.extend_keys`.

    `tables` are the block tables, int32 [at least requests, pages].
    """
    levels, capacity = out.positions.shape
    _compute_chain_levels[(levels,)](
        *start, tables, *out, capacity, tables.shape[1], page_size, spare_slot, BLOCK=_block(capacity)
    )
