"""Computes the arrays that tell recurrent layers which states and ring rows to read and write; equal for all layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from foreword.backends.batch import ForwardBatch, Ints, RequestChunks
from foreword.backends.cuda.kernels.recurrence import Segments
from foreword.backends.cuda.layout import Layout, PassShape
from foreword.backends.torch.upload import Piece
from foreword.kv.chunks import CHUNK, RING_ROWS

NOWHERE = -1
"""Index that means: do not write."""


@dataclass(frozen=True)
class UploadedStates:
    """The arrays of a pass, on the device."""

    # As in `ConvolutionInputs`:
    windows: Tensor
    ring_to: Tensor
    state_to: Tensor
    segments: Segments
    num_segments: int  # without padding; for captured passes, of the first pass of this shape
    ring_copies: Tensor  # int32 [copies, 2], (from, to) ring rows

    @staticmethod
    def of(arrays: list[Tensor], plan: Sequence[Piece], ring_copies: Tensor) -> "UploadedStates":
        """Name the uploaded arrays of a `plan` by `plan_pieces`."""
        windows, ring_to, state_to, *segments = arrays
        first_rows = plan[3]  # of the segments: the first array after windows, ring_to and state_to
        num_segments = len(first_rows.source)
        return UploadedStates(windows, ring_to, state_to, Segments(*segments), num_segments, ring_copies)


def plan_pieces(batch: ForwardBatch, layout: Layout, kernel: int, ring_rows: int) -> list[Piece]:
    """Return the arrays of a pass, padded to its shape.

    `kernel` is the width of the convolution, `ring_rows` the number of ring rows in memory.
    """
    shape, request_of_row = layout.shape, layout.requests
    first = batch.arrays.row_starts[:-1]
    numbers = np.array([_chunk_numbers(chunks) for chunks in batch.chunks], dtype=np.int32).T
    windows = _windows(batch, request_of_row, numbers, kernel, ring_rows)
    ring_to, state_to = np.full((2, len(windows)), NOWHERE, dtype=np.int32)
    begin, run, read_start, newest_start, state, _, write_ring = numbers
    # Rows of the newest chunk are written to its ring, after those that the ring has already.
    newest_row = first + np.maximum(newest_start - begin, 0)
    newest_ring_row = write_ring + np.maximum(begin - newest_start, 0)
    rows = np.arange(len(windows), dtype=np.int32)
    in_newest = rows >= newest_row[request_of_row]
    ring_to[in_newest] = ((newest_ring_row - newest_row)[request_of_row] + rows)[in_newest]
    segments = _segments(batch, numbers, state_to)
    counts = (newest_start - read_start) // CHUNK + 1
    segment_ends = np.cumsum(counts)
    request_arrays = [segment_ends - counts, segment_ends, state, first + run]
    of_segments, of_requests = segment_room(shape)
    return [
        Piece(windows, (shape.rows, kernel - 1), 0),
        Piece(ring_to, (shape.rows,), NOWHERE),
        Piece(state_to, (shape.rows,), NOWHERE),
        *(Piece(array, (of_segments,), 0) for array in segments),
        *(Piece(array.astype(np.int32), (of_requests,), 0) for array in request_arrays),
    ]


def segment_room(shape: PassShape) -> tuple[int, int]:
    """Return the maximum segments and requests of passes of a shape."""
    requests = shape.narrow_tiles + shape.wide_tiles  # every request has at least one tile
    # A request's rows fill whole chunks, and parts of one before and one after these.
    return 2 * requests + shape.rows // CHUNK, requests


def _chunk_numbers(chunks: RequestChunks) -> tuple[int, ...]:
    """Return a request's `begin` and `run`, and the numbers of the chunk it reads and of the newest chunk.

    These are: start of the read chunk, start of the newest chunk, slot of the read state, first ring row of the read
    chunk, first ring row of the newest chunk.
    """
    newest = chunks.newest
    assert chunks.read.ring is not None
    assert newest.ring is not None
    return (
        chunks.begin, chunks.run, chunks.read.start, newest.start, chunks.read.state,
        chunks.read.ring * RING_ROWS, newest.ring * RING_ROWS,
    )  # fmt: skip


def _windows(batch: ForwardBatch, request_of_row: Ints, numbers: Ints, kernel: int, ring_rows: int) -> Ints:
    """Return the indices of each row's convolution inputs: `ConvolutionInputs.windows`."""
    arrays, width = batch.arrays, kernel - 1
    begin, run, read_start, _, state, ring, _ = numbers[:, request_of_row]
    first = arrays.row_starts[:-1][request_of_row]
    source = arrays.positions[:, None] + np.arange(-width, 0, dtype=np.int32)  # positions of the inputs
    in_pass = (first - begin)[:, None] + source
    in_ring = -1 - (ring - read_start)[:, None] - source
    in_state = -1 - ring_rows - (state * width + width - read_start)[:, None] - source
    windows: Ints = np.where(
        source >= begin[:, None], in_pass, np.where(source >= read_start[:, None], in_ring, in_state)
    ).astype(np.int32)
    masks = arrays.ancestor_masks[:, 0]
    # Nodes whose ancestors are not consecutive have masks that are not of the form 0..01..1.
    for row in np.flatnonzero(masks & (masks + 1)):
        first_node_row = int(first[row] + run[row])
        path = [first_node_row + bit for bit in range(64) if int(masks[row]) >> bit & 1]
        ancestors = path[:-1][-width:]
        if ancestors:
            windows[row, width - len(ancestors) :] = ancestors
    return windows


def _segments(batch: ForwardBatch, numbers: Ints, state_to: Ints) -> Ints:
    """Return first row, count, number of ring rows, next state and ring of every segment; fill in `state_to`."""
    segments = []
    starts = batch.arrays.row_starts.tolist()
    for index, (chunks, of_request) in enumerate(zip(batch.chunks, numbers.T.tolist(), strict=True)):
        begin, _, read_start, newest_start, _, ring, _ = of_request
        row, end_row = starts[index], starts[index + 1]
        state_slots = {chunk.start: chunk.state for chunk in chunks.entered}
        for start, slot in state_slots.items():
            state_to[row + start - begin] = slot
        for start in range(read_start, newest_start + 1, CHUNK):
            first = row + max(start - begin, 0)
            # The rows of draft tokens belong to the newest chunk.
            end = end_row if start == newest_start else row + start + CHUNK - begin
            num_ring_rows, next_state = max(begin - start, 0), state_slots.get(start + CHUNK, NOWHERE)
            segments.append((first, end - first, num_ring_rows, next_state, ring))
    return np.array(segments, dtype=np.int32).T
