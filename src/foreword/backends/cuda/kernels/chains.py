"""Computes on the device where texts end that a head drafts after, and the slots of its draft rows."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.launching import kernel


@kernel(do_not_specialize=("most", "room"))
def _run_lengths(drawn, first, drafted, places, out, most, room, BLOCK: tl.constexpr):
    request = tl.arange(0, BLOCK)
    going = request < room
    row = tl.load(first + request, mask=going, other=0)
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    for level in range(most):
        place = tl.load(places + request * most + level, mask=going, other=-1)
        going = going & (place >= 0)
        token = tl.load(drafted + place, mask=going, other=0)
        own = tl.load(drawn + row + level, mask=going, other=-1)
        going = going & (tl.maximum(token, 0) == own)
        found += going.to(tl.int32)
    tl.store(out + request, found, mask=request < room)


def _block(room: int) -> int:
    """Return the requests that one program has room for: few sizes, so that few variants are compiled."""
    return max(128, triton.next_power_of_2(room))


def run_lengths(drawn: Tensor, first: Tensor, drafted: Tensor, places: Tensor, out: Tensor) -> None:
    """Count each request's accepted draft tokens: leading ones that equal the target's draw.

    drawn and drafted int64; first int32 [requests], places int32 [requests, most], -1 where there is none; into
    out int32 [requests]. A draft token that could not be drawn was read as token 0.
    """
    room, most = places.shape
    _run_lengths[(1,)](
        drawn, first, drafted, places, out, most, room, BLOCK=_block(room)
    )  # fmt: skip


class ChainPlaces(NamedTuple):
    """Slots and positions of all draft rows [levels, requests], and the row that every draft starts from."""

    last: Tensor  # int32 [requests]
    keys: Tensor  # int64, noise keys of the draws
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
    wanted, gained_by, lengths, steps, ends, stems, tables, last, keys, positions, slots,
    room, pages, page_size, spare_slot, BLOCK: tl.constexpr,
):  # fmt: skip
    level = tl.program_id(0)
    request = tl.arange(0, BLOCK)
    there = request < room
    gained = tl.load(gained_by + request, mask=there, other=0)
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
        tl.store(last + request, tl.load(wanted + request, mask=there, other=0) + gained, mask=there)


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
    """Inputs of the pass over every request's newest draft token, and of the draw after it."""

    tokens: Tensor  # int64 [requests]
    key: Tensor  # int64, noise key of the next token
    position: Tensor  # int32
    seen: Tensor  # int32, number of positions that its row attends to
    slot: Tensor  # int32
    cosine: Tensor  # float32 [requests, dim / 2]
    sine: Tensor  # float32

    @staticmethod
    def empty(room: int, half: int, device: torch.device) -> "Level":
        """Return memory for `room` requests."""

        def zeros(dtype: torch.dtype, *more: int) -> Tensor:
            return torch.zeros((room, *more), dtype=dtype, device=device)

        whole, small = torch.int64, torch.int32
        tokens, key, position, seen, slot = map(zeros, (whole, whole, small, small, small))
        return Level(
            tokens, key, position, seen, slot, zeros(torch.float32, half), zeros(torch.float32, half)
        )


def take_level(
    levels: Tensor,
    drawn: Tensor,
    places: ChainPlaces,
    cos_sin: tuple[Tensor, Tensor],
    chain: Tensor,
    into: Level,
) -> None:
    """Store the drawn tokens, int64 [requests], as the next level of the chain, int64 [most, requests].

    `levels`, int32 [requests], is the level and is incremented; `into` receives the inputs of that level.
    """
    most, room = chain.shape
    half = into.cosine.shape[1]
    _take_level[(room,)](
        levels, drawn, *places[1:], *cos_sin, chain, *into, room, most,
        HALF=half, BLOCK=triton.next_power_of_2(half),
    )  # fmt: skip


class ChainEnds(NamedTuple):
    """State of every request [requests] before the chain."""

    wanted: Tensor  # int32, row that its draft starts from if no draft token is accepted
    gained_by: Tensor  # int32, tokens that the pass in flight adds
    lengths: Tensor  # int32, its tokens without those that are added
    steps: Tensor  # int32, draft tokens; 0: padding
    ends: Tensor  # int32, one past its last reserved KV row
    stems: Tensor  # int64, noise key prefixes


def chain_places(of: ChainEnds, tables: Tensor, page_size: int, spare_slot: int, out: ChainPlaces) -> None:
    """tables int32 [at least requests, pages]. The keys are those of `acceptance.noise.absorbed`."""
    levels, room = out.positions.shape
    _chain_places[(levels,)](
        *of, tables, *out, room, tables.shape[1], page_size, spare_slot, BLOCK=_block(room)
    )
