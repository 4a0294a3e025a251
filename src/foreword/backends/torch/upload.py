"""Uploads arrays from the host to a device: one copy a pass, into memory that stays where it is."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.backends.batch import Ints

Shapes = tuple[tuple[int, ...], ...]

_KEPT_VIEWS = 1024
"""Shapes whose views of the memory are kept: making them takes longer than filling them."""


class Piece(NamedTuple):
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
        self._views: dict[
            Shapes, tuple[Tensor, list[Tensor]]
        ] = {}  # of the device's memory: all, and in parts

    @property
    def entries(self) -> int:
        """32-bit numbers that there is room for."""
        return len(self._on_device)

    def copy(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """The padded arrays on the device, one after the other."""
        shapes = tuple([piece.shape for piece in pieces])
        self._host, self._other_host = self._other_host, self._host
        staged = self._host.filled(pieces, shapes)
        landed, parts = self._views.get(shapes) or self._new_views(shapes)
        landed.copy_(staged, non_blocking=True)
        self._host.mark_copied()
        return parts

    def _new_views(self, shapes: Shapes) -> tuple[Tensor, list[Tensor]]:
        sizes = [prod(shape) for shape in shapes]
        total = sum(sizes)
        if total > len(self._on_device):
            self._on_device = self._on_device.new_empty(max(total, 2 * len(self._on_device)))
            self._views.clear()
        landed = self._on_device[:total]
        parts = zip(landed.split_with_sizes(sizes), shapes, strict=True)
        views = landed, [part.view(shape) for part, shape in parts]
        if len(self._views) >= _KEPT_VIEWS:
            self._views.clear()
        self._views[shapes] = views
        return views


class _HostBlock:
    """Memory that the device can copy from while the host goes on; page-locked where that is a GPU."""

    def __init__(self, device: torch.device, entries: int) -> None:
        self._pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        self._memory = self._allocate(entries)
        self._views: dict[Shapes, tuple[Tensor, list[Ints]]] = {}  # all of a pass, and its parts

    def filled(self, pieces: Sequence[Piece], shapes: Shapes) -> Tensor:
        """The pieces one after the other, padded to their shapes: int32, flat."""
        if self._copied is not None:
            self._copied.synchronize()
        staged, rooms = self._views.get(shapes) or self._new_views(shapes)
        for (source, shape, fill), room in zip(pieces, rooms, strict=True):
            if source.shape == shape:
                room[...] = source
            elif len(shape) == 1:
                count = len(source)
                room[:count] = source
                room[count:] = fill
            else:
                room.fill(fill)
                room[tuple([slice(length) for length in source.shape])] = source
        return staged

    def _new_views(self, shapes: Shapes) -> tuple[Tensor, list[Ints]]:
        total = sum(map(prod, shapes))
        if total > len(self._memory):
            self._memory = self._allocate(max(total, 2 * len(self._memory)))
            self._views.clear()
        rooms: list[Ints] = []
        start, array = 0, self._memory.numpy()
        for shape in shapes:
            end = start + prod(shape)
            rooms.append(array[start:end].reshape(shape))
            start = end
        if len(self._views) >= _KEPT_VIEWS:
            self._views.clear()
        self._views[shapes] = views = self._memory[:total], rooms
        return views

    def mark_copied(self) -> None:
        """The copy of what was filled in has been started."""
        if self._copied is not None:
            self._copied.record()

    def _allocate(self, entries: int) -> Tensor:
        return torch.empty(entries, dtype=torch.int32, pin_memory=self._pinned)
