"""Arrays on their way from the host to a device: one copy a pass, into memory that stays where it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from foreword.backends.batch import Ints


@dataclass(frozen=True)
class Piece:
    """One array and the room that it gets."""

    source: Ints
    shape: tuple[int, ...]
    fill: int  # what padding holds


class Upload:
    """Page-locked memory on the host, and its copy on the device.

    The device memory is written in stream order, after the kernels of the pass before have read it. On the
    host two blocks are used in turn; writing one waits only if its copy of two passes ago is still to come.
    """

    def __init__(self, device: torch.device, entries: int) -> None:
        """The memory has room for `entries` 32-bit numbers to begin with; more than that make it grow, and move."""
        self._on_device = torch.empty(entries, dtype=torch.int32, device=device)
        self._host, self._other_host = _HostBlock(device, entries), _HostBlock(device, entries)

    @property
    def entries(self) -> int:
        """32-bit numbers that there is room for."""
        return len(self._on_device)

    def copy(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """The padded arrays on the device, one after the other."""
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

    def filled(self, pieces: Sequence[Piece], total: int) -> Tensor:
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
