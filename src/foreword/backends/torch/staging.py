"""Takes a batch from the host to a decoder's device: one copy a pass, into memory that stays where it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import BATCH_ARRAYS, BatchSizes, ForwardBatch, Ints, Padding


@dataclass(frozen=True)
class RequestGroup:
    """Requests with about equally many rows: their attention is computed side by side."""

    members: Tensor  # int32 [requests], numbers of requests; padded with that of a request without rows
    places: int  # rows that each of them has room for
    kv_rows: int  # logical KV rows that the longest of them can see, or some more


@dataclass(frozen=True)
class StagedBatch:
    """A batch on the device, padded.

    Padding rows belong to no request, write to a KV row that nobody reads, and are read by nobody. Requests
    after the real ones have neither rows nor KV; there is at least one.
    """

    batch: ForwardBatch  # its arrays are padded
    groups: tuple[RequestGroup, ...]  # every request with rows is in one of them
    num_logits: int  # the first entries of `logit_rows` that are real
    num_hidden: int  # the first entries of `hidden_rows` that are real


@dataclass(frozen=True)
class _Piece:
    """One array of the batch and the room that it gets."""

    source: Ints
    shape: tuple[int, ...]
    fill: int  # what padding holds


class Staging:
    """Page-locked memory on the host, and its copy on the device, for one decoder.

    The device memory is written in stream order, after the kernels of the pass before have read it. On the
    host two blocks are used in turn; writing one waits only if its copy of two passes ago is still to come.
    """

    def __init__(self, device: torch.device, bucketed: bool, entries: int = 1 << 14) -> None:
        """`bucketed` rounds all sizes up to powers of two, so that few shapes occur.

        The memory has room for `entries` 32-bit numbers to begin with; larger batches make it grow.
        """
        self._bucketed = bucketed
        self._on_device = torch.empty(entries, dtype=torch.int32, device=device)
        self._host, self._other_host = _HostBlock(device, entries), _HostBlock(device, entries)

    def stage(self, batch: ForwardBatch, page_size: int, spare_slot: int) -> StagedBatch:
        """Start the copy of `batch` (on the CPU). Padding rows write to `spare_slot`."""
        pieces, groups = self._pieces(batch, spare_slot), self._groups(batch, page_size)
        members = [np.array(numbers, dtype=np.int32) for numbers, _, _ in groups]
        arrays = self._copied([*pieces, *(_Piece(numbers, numbers.shape, 0) for numbers in members)])
        padded: dict[str, Any] = {
            spec.name: words.view(torch.int64) if spec.words == 2 else words
            for spec, words in zip(BATCH_ARRAYS, arrays, strict=False)
        }
        grouped = zip(arrays[len(pieces) :], groups, strict=True)
        return StagedBatch(
            batch=replace(batch, **padded),
            groups=tuple(RequestGroup(numbers, places, kv_rows) for numbers, (_, places, kv_rows) in grouped),
            num_logits=len(batch.logit_rows),
            num_hidden=len(batch.hidden_rows),
        )

    def _pieces(self, batch: ForwardBatch, spare_slot: int) -> list[_Piece]:
        """The arrays as 32-bit words with their padded shapes."""
        host = batch.arrays
        sizes = BatchSizes(*map(self._rounded, host.sizes))
        sizes = sizes._replace(requests=sizes.requests + 1)
        fills = {
            Padding.ZERO: 0,
            Padding.SPARE_SLOT: spare_slot,
            Padding.NUM_ROWS: len(host.token_ids),
        }
        pieces = []
        for spec in BATCH_ARRAYS:
            array: Ints = getattr(host, spec.name)
            *leading, last = spec.shape(sizes)
            pieces.append(_Piece(array.view(np.int32), (*leading, last * spec.words), fills[spec.padding]))
        return pieces

    def _groups(self, batch: ForwardBatch, page_size: int) -> list[tuple[list[int], int, int]]:
        """(members, places, kv rows) of every group."""
        starts, kv_lens = batch.row_starts.tolist(), batch.kv_lens.tolist()
        by_places: dict[int, list[int]] = {}
        for request in range(len(kv_lens)):
            if count := starts[request + 1] - starts[request]:
                by_places.setdefault(self._rounded(count), []).append(request)
        groups = []
        for places, members in sorted(by_places.items()):
            kv_rows = max(kv_lens[request] for request in members)
            if self._bucketed:
                kv_rows = self._rounded(-(-kv_rows // page_size)) * page_size
            without_rows = self._rounded(len(kv_lens))
            padding = [without_rows] * (self._rounded(len(members)) - len(members))
            groups.append((members + padding, places, kv_rows))
        return groups

    def _rounded(self, count: int) -> int:
        return 1 << (count - 1).bit_length() if self._bucketed and count else count

    def _copied(self, pieces: Sequence[_Piece]) -> list[Tensor]:
        """The padded arrays on the device, by one copy."""
        sizes = [prod(piece.shape) for piece in pieces]
        total = sum(sizes)
        self._host, self._other_host = self._other_host, self._host
        staged = self._host.filled(pieces, total)
        if total > len(self._on_device):
            self._on_device = self._on_device.new_empty(max(total, 2 * len(self._on_device)))
        landed = self._on_device[:total].copy_(staged, non_blocking=True)
        self._host.mark_copied()
        parts = landed.split_with_sizes(sizes)
        return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]


class _HostBlock:
    """Memory that the device can copy from while the host goes on; page-locked where that is a GPU."""

    def __init__(self, device: torch.device, entries: int) -> None:
        self._pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        self._memory = self._allocate(entries)

    def filled(self, pieces: Sequence[_Piece], total: int) -> Tensor:
        """The pieces one after the other, padded: int32 [total]."""
        if self._copied is not None:
            self._copied.synchronize()
        if total > len(self._memory):
            self._memory = self._allocate(max(total, 2 * len(self._memory)))
        array, start = self._memory.numpy(), 0
        for piece in pieces:
            end = start + prod(piece.shape)
            room = array[start:end].reshape(piece.shape)
            room.fill(piece.fill)
            room[tuple(slice(length) for length in piece.source.shape)] = piece.source
            start = end
        return self._memory[:total]

    def mark_copied(self) -> None:
        """The copy of what was filled in has been started."""
        if self._copied is not None:
            self._copied.record()

    def _allocate(self, entries: int) -> Tensor:
        return torch.empty(entries, dtype=torch.int32, pin_memory=self._pinned)
