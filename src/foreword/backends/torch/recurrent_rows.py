"""Memory of recurrent layers in torch tensors, and what a pass reads and writes there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import BatchArrays, ForwardBatch, RequestChunks
from foreword.kv.chunks import CHUNK, RING_ROWS, StateSizes
from foreword.kv.spec import StateSpec


class RowParts(NamedTuple):
    """Parts of ring rows, one row per token: [rows, ...]."""

    inputs: Tensor  # [channels], of the convolution
    keys: Tensor  # [key heads, key size]
    updates: Tensor  # [heads, value size], what the token adds to the state
    decays: Tensor  # float32 [heads], sum of the log decays since the chunk began

    def joined(self, more: "RowParts") -> "RowParts":
        return RowParts(*(torch.cat(pair) for pair in zip(self, more, strict=True)))

    def first(self, count: int) -> "RowParts":
        return RowParts(*(part[:count] for part in self))


class LayerState(NamedTuple):
    """State before a chunk."""

    matrix: Tensor  # float32 [heads, key size, value size]
    inputs: Tensor  # [kernel - 1, channels], the convolution's newest inputs


class RecurrentStore:
    """States and rings of all recurrent layers. Slot 0 holds the state before the first token: zeros."""

    def __init__(
        self,
        spec: StateSpec,
        sizes: StateSizes,
        dtype: torch.dtype,
        device: torch.device,
        row_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is of the convolution's inputs, `row_dtype` of keys and updates in rings."""

        def memory(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((spec.num_layers, *shape), dtype=kind, device=device)

        rows = sizes.rings * RING_ROWS
        self.ring = RowParts(
            memory(rows, spec.channels, kind=dtype),
            memory(rows, spec.key_heads, spec.key_dim, kind=row_dtype),
            memory(rows, spec.heads, spec.value_dim, kind=row_dtype),
            memory(rows, spec.heads),
        )
        self.states = LayerState(
            memory(sizes.states, spec.heads, spec.key_dim, spec.value_dim),
            memory(sizes.states, spec.kernel - 1, spec.channels, kind=dtype),
        )
        for array in self.states:
            array[:, 0] = 0

    def move(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy ring rows (from, to) in all layers; all are read before any is written."""
        if copies:
            source, target = torch.tensor(copies).unbind(1)
            for array in self.ring:
                array[:, target] = array[:, source]

    def rows(self, layer: int, first: int, count: int) -> RowParts:
        """Return consecutive ring rows of a layer, as views."""
        return RowParts(*(array[layer, first : first + count] for array in self.ring))

    def write_rows(self, layer: int, first: int, rows: RowParts) -> None:
        for array, part in zip(self.ring, rows, strict=True):
            array[layer, first : first + len(part)] = part

    def state(self, layer: int, slot: int) -> LayerState:
        return LayerState(*(array[layer, slot] for array in self.states))

    def write_state(self, layer: int, slot: int, state: LayerState) -> None:
        for array, part in zip(self.states, state, strict=True):
            array[layer, slot] = part


@dataclass(frozen=True)
class Segment:
    """New rows of one request within one chunk, in a pass."""

    rows: slice  # in the batch
    known: int  # committed rows of the chunk before them
    visible: Tensor  # bool [new rows, new rows], ancestors and the row itself
    window: (
        Tensor  # int64 [new rows, kernel], oldest first: indices into (state's inputs, known rows, new rows)
    )


@dataclass(frozen=True)
class RequestPass:
    """Segments of one request, in order, and where states and rows are read and written."""

    read_state: int
    read_ring: int  # physical row
    segments: tuple[Segment, ...]
    folds: tuple[int | None, ...]  # [segments - 1], slot of the state after each segment; None: not kept
    write_ring: int  # physical row of the last segment's first new row


def request_passes(batch: ForwardBatch, kernel: int, device: torch.device) -> list[RequestPass]:
    """Return what every request reads and writes, equal for all layers. The batch is on the host, unpadded."""
    arrays = batch.arrays
    starts = arrays.row_starts.tolist()
    return [
        _request_pass(chunks, arrays, starts[index], starts[index + 1], kernel, device)
        for index, chunks in enumerate(batch.chunks)
    ]


def _request_pass(
    chunks: RequestChunks, arrays: BatchArrays, first: int, end: int, kernel: int, device: torch.device
) -> RequestPass:
    read, newest = chunks.read, (chunks.read, *chunks.entered)[-1]
    kept = {chunk.start: chunk.state for chunk in chunks.entered}
    segments = []
    for start in range(read.start, newest.start + 1, CHUNK):
        own = first + max(start - chunks.begin, 0)
        stop = end if start == newest.start else first + start + CHUNK - chunks.begin
        segments.append(_segment(arrays, slice(own, stop), max(chunks.begin - start, 0), kernel, device))
    assert read.ring is not None
    assert newest.ring is not None
    return RequestPass(
        read.state,
        read.ring * RING_ROWS,
        tuple(segments),
        tuple(kept.get(start) for start in range(read.start + CHUNK, newest.start + 1, CHUNK)),
        newest.ring * RING_ROWS + segments[-1].known,
    )


def _segment(arrays: BatchArrays, rows: slice, known: int, kernel: int, device: torch.device) -> Segment:
    """Return the visible rows and convolution windows of new rows that follow `known` ones."""
    count = rows.stop - rows.start
    visible = np.tril(np.ones((count, count), dtype=bool))
    window = known + np.arange(count)[:, None] + np.arange(kernel)
    nodes = int((arrays.prefix_lens[rows] <= arrays.positions[rows]).sum())  # the others are committed
    committed = count - nodes
    for row in range(committed, count):
        mask = int(arrays.ancestor_masks[rows.start + row, 0])
        path = [committed + node for node in range(nodes) if mask >> node & 1]  # ends with the row itself
        visible[row, committed:] = False
        visible[row, path] = True
        before = [*range(committed - kernel, committed), *path][-kernel:]
        window[row] = known + kernel - 1 + np.array(before)
    return Segment(rows, known, torch.from_numpy(visible).to(device), torch.from_numpy(window).to(device))
