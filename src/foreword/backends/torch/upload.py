"""Uploads arrays to a device: one copy per pass, into fixed memory."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.backends.batch import Ints

Shapes = tuple[tuple[int, ...], ...]

_MAX_CACHED_SHAPES = 1024
"""Maximum number of shapes whose views are cached: creating views takes longer than filling them."""

_ALIGNED = 4
"""Every array begins at a multiple of this many 32-bit numbers: kernels are compiled for 16-byte aligned addresses."""


class Piece(NamedTuple):
    """An array and its padded size."""

    source: Ints
    shape: tuple[int, ...]
    padding: int  # value of entries beyond the source


def array_offsets(shapes: Shapes) -> tuple[list[int], int]:
    """Return where each array begins in memory that has them all, and the size of that memory, in 32-bit numbers."""
    starts, end = [], 0
    for shape in shapes:
        starts.append(end)
        end += -(-prod(shape) // _ALIGNED) * _ALIGNED
    return starts, end


class Upload:
    """Page-locked memory on the host, and memory on the device to which it is copied.

    Device memory is written in stream order, after the previous pass has read it. Two host blocks alternate, so that
    writing to one waits only for its copy of two passes ago.
    """

    def __init__(self, device: torch.device, entries: int) -> None:
        """The initial memory has room for `entries` 32-bit numbers; it grows, and moves, on demand."""
        self._on_device = torch.empty(entries, dtype=torch.int32, device=device)
        self._host, self._other_host = _HostBlock(device, entries), _HostBlock(device, entries)
        # Views of device memory by shapes: one view of all arrays together, and one of each array
        self._views: dict[Shapes, tuple[Tensor, list[Tensor]]] = {}

    @property
    def entries(self) -> int:
        return len(self._on_device)

    def copy(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Start the copy of padded arrays; return them on the device, valid until the next copy."""
        shapes = tuple([piece.shape for piece in pieces])
        self._host, self._other_host = self._other_host, self._host
        staged = self._host.fill(pieces, shapes)
        on_device, parts = self._views.get(shapes) or self._new_views(shapes)
        on_device.copy_(staged, non_blocking=True)
        self._host.mark_copied()
        return parts

    def _new_views(self, shapes: Shapes) -> tuple[Tensor, list[Tensor]]:
        starts, total = array_offsets(shapes)
        if total > len(self._on_device):
            self._on_device = self._on_device.new_empty(max(total, 2 * len(self._on_device)))
            self._views.clear()
        on_device = self._on_device[:total]
        parts = zip(starts, shapes, strict=True)
        views = on_device, [on_device[start : start + prod(shape)].view(shape) for start, shape in parts]
        if len(self._views) >= _MAX_CACHED_SHAPES:
            self._views.clear()
        self._views[shapes] = views
        return views


class _HostBlock:
    """Host memory for asynchronous copies; page-locked for a GPU."""

    def __init__(self, device: torch.device, entries: int) -> None:
        self._pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        self._memory = self._allocate(entries)
        self._views: dict[Shapes, tuple[Tensor, list[Ints]]] = {}  # as in `Upload`

    def fill(self, pieces: Sequence[Piece], shapes: Shapes) -> Tensor:
        """Write the padded pieces to the block, one after another; return the part that has them, int32."""
        if self._copied is not None:
            self._copied.synchronize()
        staged, targets = self._views.get(shapes) or self._new_views(shapes)
        for (source, shape, padding), target in zip(pieces, targets, strict=True):
            if source.shape == shape:
                target[...] = source
            elif len(shape) == 1:
                count = len(source)
                target[:count] = source
                target[count:] = padding
            else:
                target.fill(padding)
                target[tuple([slice(length) for length in source.shape])] = source
        return staged

    def _new_views(self, shapes: Shapes) -> tuple[Tensor, list[Ints]]:
        starts, total = array_offsets(shapes)
        if total > len(self._memory):
            self._memory = self._allocate(max(total, 2 * len(self._memory)))
            self._views.clear()
        array, parts = self._memory.numpy(), zip(starts, shapes, strict=True)
        targets: list[Ints] = [array[start : start + prod(shape)].reshape(shape) for start, shape in parts]
        if len(self._views) >= _MAX_CACHED_SHAPES:
            self._views.clear()
        self._views[shapes] = views = self._memory[:total], targets
        return views

    def mark_copied(self) -> None:
        if self._copied is not None:
            self._copied.record()

    def _allocate(self, entries: int) -> Tensor:
        return torch.empty(entries, dtype=torch.int32, pin_memory=self._pinned)
