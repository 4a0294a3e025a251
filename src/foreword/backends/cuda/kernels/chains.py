"""Prepares a head's chains on the device: accepted tokens of the pass in flight, then positions, slots and noise keys.

The host knows the end of a text only after the verdict. These kernels compute it on the device, so that drafting starts
earlier. `room` is the number of requests that an array has space for, including padding.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.launching import kernel


@kernel(do_not_specialize=("most", "room"))
def _count_accepted(drawn, first, drafted, places, out, most, room, BLOCK: tl.constexpr):
    request = tl.arange(0, BLOCK)
    is_accepted = request < room
    row = tl.load(first + request, mask=is_accepted, other=0)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for level in range(most):
        place = tl.load(places + request * most + level, mask=is_accepted, other=-1)
        is_accepted = is_accepted & (place >= 0)
        token = tl.load(drafted + place, mask=is_accepted, other=0)
        own = tl.load(drawn + row + level, mask=is_accepted, other=-1)
        is_accepted = is_accepted & (tl.maximum(token, 0) == own)
        count += is_accepted.to(tl.int32)
    tl.store(out + request, count, mask=request < room)


def _block(room: int) -> int:
    """Return `room` rounded up to a block size. There are few sizes, so that few variants are compiled."""
    return max(128, triton.next_power_of_2(room))


def count_accepted(drawn: Tensor, first: Tensor, drafted: Tensor, places: Tensor, out: Tensor) -> None:
    """Count each request's accepted draft tokens: leading ones that equal the target's draw.

    `drawn` has the target's tokens, from row `first` of each request on, and `drafted` the draft tokens (int64).
    `places`, int32 [requests, levels], are indices into `drafted`; -1: no draft token. `first` and `out` are int32
    [requests]. A negative draft token could not be sampled; the pass computed token 0 instead.
    """
    room, most = places.shape
    _count_accepted[(1,)](
        drawn, first, drafted, places, out, most, room, BLOCK=_block(room)
    )  # fmt: skip


class ChainPlaces(NamedTuple):
    """Slots, positions and noise keys of all draft rows, [levels, requests]; and the row before each chain."""

    last: Tensor  # int32 [requests], row of the head's first pass that the chain follows
    keys: Tensor  # int64, noise keys for sampling
    positions: Tensor  # int32
    slots: Tensor  # int32

    @staticmethod
    def empty(levels: int, room: int, device: torch.device) -> "ChainPlaces":
        """Return memory for `room` requests."""
        small = torch.zeros((2, levels, room), dtype=torch.int32, device=device)
        keys = torch.zeros((levels, room), dtype=torch.int64, device=device)
        return ChainPlaces(torch.zeros(room, dtype=torch.int32, device=device), keys, small[0], small[1])


@kernel(do_not_specialize=("room", "pages", "page_size", "spare_slot"))
def _chain_places(
    row_ids, accepted, lengths, steps, ends, stems, tables, last, keys, positions, slots,
    room, pages, page_size, spare_slot, BLOCK: tl.constexpr,
):  # fmt: skip
    level = tl.program_id(0)
    request = tl.arange(0, BLOCK)
    there = request < room
    gained = tl.load(accepted + request, mask=there, other=0)
    position = tl.load(lengths + request, mask=there, other=0) + gained + level
    stem = tl.load(stems + request, mask=there, other=0).to(tl.uint64, bitcast=True)
    key = (stem + 0x9E3779B97F4A7C15) ^ position.to(tl.uint64)
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key = key ^ (key >> 31)
    # The row of the last draft token is not read.
    is_read = there & (level + 1 < tl.load(steps + request, mask=there, other=0))
    is_kept = is_read & (position < tl.load(ends + request, mask=there, other=0))
    page = tl.minimum(position // page_size, pages - 1)
    physical = tl.load(tables + request * pages + page, mask=is_kept, other=0)
    slot = tl.where(is_kept, physical * page_size + position % page_size, spare_slot)
    place = level * room + request
    tl.store(keys + place, key.to(tl.int64, bitcast=True), mask=there)
    tl.store(positions + place, tl.where(is_read, position, 0), mask=there)
    tl.store(slots + place, slot, mask=there)
    if level == 0:
        tl.store(last + request, tl.load(row_ids + request, mask=there, other=0) + gained, mask=there)


@kernel(do_not_specialize=("room", "most"))
def _take_level(
    levels, drawn, keys, positions, slots, cosines, sines, chain, tokens, key, position, seen, slot, cosine, sine,
    room, most, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    level = tl.load(levels + request)
    at = level * room + request
    token = tl.load(drawn + request)
    tl.store(chain + at, token)
    tl.store(tokens + request, tl.maximum(token, 0))
    where = tl.load(positions + at)
    tl.store(position + request, where)
    tl.store(seen + request, where + 1)
    tl.store(slot + request, tl.load(slots + at))
    tl.store(key + request, tl.load(keys + at + room, mask=level + 1 < most, other=0))
    i = tl.arange(0, BLOCK)
    there = i < HALF
    tl.store(cosine + request * HALF + i, tl.load(cosines + at * HALF + i, mask=there), mask=there)
    tl.store(sine + request * HALF + i, tl.load(sines + at * HALF + i, mask=there), mask=there)
    tl.store(levels + request, level + 1)


class Level(NamedTuple):
    """Inputs of the head's pass over the newest draft token of every request, and of sampling the next one."""

    tokens: Tensor  # int64 [requests]
    key: Tensor  # int64, noise key of the next token
    position: Tensor  # int32
    seen: Tensor  # int32, number of positions that the row attends to
    slot: Tensor  # int32
    cosine: Tensor  # float32 [requests, dim / 2]
    sine: Tensor  # float32

    @staticmethod
    def empty(room: int, half: int, device: torch.device) -> "Level":
        """Return memory for `room` requests."""

        def zeros(dtype: torch.dtype, *more: int) -> Tensor:
            return torch.zeros((room, *more), dtype=dtype, device=device)

        return Level(
            tokens=zeros(torch.int64),
            key=zeros(torch.int64),
            position=zeros(torch.int32),
            seen=zeros(torch.int32),
            slot=zeros(torch.int32),
            cosine=zeros(torch.float32, half),
            sine=zeros(torch.float32, half),
        )


def take_level(
    levels: Tensor,
    drawn: Tensor,
    places: ChainPlaces,
    cos_sin: tuple[Tensor, Tensor],
    chain: Tensor,
    into: Level,
) -> None:
    """Store the drawn tokens, int64 [requests], as the next level of the chain, int64 [levels, requests].

    `levels`, int32 [requests], is the index of this level and is incremented; `into` receives the level's inputs.
    """
    most, room = chain.shape
    half = into.cosine.shape[1]
    _take_level[(room,)](
        levels, drawn, *places[1:], *cos_sin, chain, *into, room, most,
        HALF=half, BLOCK=triton.next_power_of_2(half),
    )  # fmt: skip


class ChainEnds(NamedTuple):
    """State of every request [requests] before the chain."""

    row_ids: Tensor  # int32, row of the head's pass before the chain if no draft token is accepted
    accepted: Tensor  # int32, draft tokens that the pass in flight accepts
    lengths: Tensor  # int32, text length if the pass in flight accepts no draft token
    steps: Tensor  # int32, tokens to draft; 0: padding
    ends: Tensor  # int32, one past its last reserved KV row
    stems: Tensor  # int64, noise key prefixes


def chain_places(of: ChainEnds, tables: Tensor, page_size: int, spare_slot: int, out: ChainPlaces) -> None:
    """Compute `out` for chains after the given ends. The noise keys are those of `acceptance.noise.extend_keys`.

    `tables` are the block tables, int32 [at least requests, pages].
    """
    levels, room = out.positions.shape
    _chain_places[(levels,)](
        *of, tables, *out, room, tables.shape[1], page_size, spare_slot, BLOCK=_block(room)
    )
