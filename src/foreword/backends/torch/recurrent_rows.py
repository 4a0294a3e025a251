"""Memory of recurrent layers in torch tensors, and which rows and states of it a pass reads and writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import BatchArrays, ForwardBatch, RequestChunks
from foreword.kv.chunks import CHUNK, RING_ROWS, StateSizes
from foreword.kv.spec import StateSpec


class RingArrays(NamedTuple):
    """Arrays of ring rows, one row per token."""

    inputs: Tensor  # [rows, channels], inputs of the convolution
    keys: Tensor  # [rows, key heads, key size]
    updates: Tensor  # [rows, heads, value size], what the token adds to the state
    decays: Tensor  # float32 [rows, heads], sum of the log decays since the chunk began

    def concatenated(self, more: "RingArrays") -> "RingArrays":
        return RingArrays(*(torch.cat(pair) for pair in zip(self, more, strict=True)))

    def first(self, count: int) -> "RingArrays":
        """Return the first rows, as views."""
        return RingArrays(*(part[:count] for part in self))


class LayerState(NamedTuple):
    """State of a recurrent layer before a chunk."""

    matrix: Tensor  # float32 [heads, key size, value size]
    inputs: Tensor  # [kernel - 1, channels], the convolution's newest inputs


class RecurrentStore:
    """States and rings of all recurrent layers. Slot 0 has the state before the first token, which is zero."""

    def __init__(
        self,
        spec: StateSpec,
        sizes: StateSizes,
        dtype: torch.dtype,
        device: torch.device,
        row_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is that of the convolution's inputs, `row_dtype` that of keys and updates in rings."""

        def memory(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((spec.num_layers, *shape), dtype=kind, device=device)

        rows = sizes.rings * RING_ROWS
        self.ring = RingArrays(
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

    def rows(self, layer: int, first: int, count: int) -> RingArrays:
        """Return consecutive ring rows of a layer, as views."""
        return RingArrays(*(array[layer, first : first + count] for array in self.ring))

    def write_rows(self, layer: int, first: int, rows: RingArrays) -> None:
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

    rows: slice  # of the batch
    num_ring_rows: int  # earlier rows of the chunk, which are in the ring
    visible: Tensor  # bool [new rows, new rows], ancestors and the row itself
    # int64 [new rows, kernel], oldest first: indices into the inputs of the state, the ring rows and the new rows,
    # concatenated
    window: Tensor


@dataclass(frozen=True)
class RequestPass:
    """Segments of one request, in order, and where states and rows are read and written."""

    read_state: int  # slot
    read_ring: int  # physical ring row
    segments: tuple[Segment, ...]
    # [segments - 1], slot to store the state after each segment in; None: not stored
    next_states: tuple[int | None, ...]
    write_ring: int  # physical ring row of the last segment's first new row


def request_passes(batch: ForwardBatch, kernel: int, device: torch.device) -> list[RequestPass]:
    """Return what every request reads and writes, equal for all layers. The batch is on the host and unpadded."""
    arrays = batch.arrays
    starts = arrays.row_starts.tolist()
    return [
        _request_pass(chunks, arrays, starts[index], starts[index + 1], kernel, device)
        for index, chunks in enumerate(batch.chunks)
    ]


def _request_pass(
    chunks: RequestChunks, arrays: BatchArrays, first: int, end: int, kernel: int, device: torch.device
) -> RequestPass:
    """Return the pass of the request with the batch's rows `first` .. `end` - 1: one segment per chunk."""
    read, newest = chunks.read, chunks.newest
    state_slots = {chunk.start: chunk.state for chunk in chunks.entered}
    segments = []
    for start in range(read.start, newest.start + 1, CHUNK):
        first_row = first + max(start - chunks.begin, 0)
        # The rows of draft tokens belong to the newest chunk.
        end_row = end if start == newest.start else first + start + CHUNK - chunks.begin
        num_ring_rows = max(chunks.begin - start, 0)
        segments.append(_segment(arrays, slice(first_row, end_row), num_ring_rows, kernel, device))
    assert read.ring is not None
    assert newest.ring is not None
    return RequestPass(
        read.state,
        read.ring * RING_ROWS,
        tuple(segments),
        tuple(state_slots.get(start) for start in range(read.start + CHUNK, newest.start + 1, CHUNK)),
        newest.ring * RING_ROWS + segments[-1].num_ring_rows,
    )


def _segment(
    arrays: BatchArrays, rows: slice, num_ring_rows: int, kernel: int, device: torch.device
) -> Segment:
    """Return the segment of new `rows` that follow `num_ring_rows` earlier rows of their chunk."""
    count = rows.stop - rows.start
    visible = np.tril(np.ones((count, count), dtype=bool))
    window = num_ring_rows + np.arange(count)[:, None] + np.arange(kernel)
    nodes = int((arrays.prefix_lens[rows] <= arrays.positions[rows]).sum())  # the others are committed
    committed = count - nodes
    for row in range(committed, count):
        mask = int(arrays.ancestor_masks[rows.start + row, 0])
        path = [committed + node for node in range(nodes) if mask >> node & 1]  # ends with the row itself
        visible[row, committed:] = False
        visible[row, path] = True
        # The newest `kernel` rows of the node's path; new rows are indexed after the inputs of state and ring.
        window_rows = [*range(committed - kernel, committed), *path][-kernel:]
        window[row] = num_ring_rows + kernel - 1 + np.array(window_rows)
    return Segment(
        rows, num_ring_rows, torch.from_numpy(visible).to(device), torch.from_numpy(window).to(device)
    )
