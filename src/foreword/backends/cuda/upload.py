"""Uploads a pass to the device in one copy: the batch's arrays, and its rows in tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import BATCH_ARRAYS, ForwardBatch
from foreword.backends.cuda.kernels.attention import (
    PLAIN,
    AttentionMetadata,
    RowTiles,
    ScoreRule,
    Workspace,
    attend,
)
from foreword.backends.cuda.layout import Layout, PassShape
from foreword.backends.cuda.state_plan import UploadedStates
from foreword.backends.torch.staging import as_batch, padded_pieces
from foreword.backends.torch.upload import Piece, Upload, array_offsets

FIXED_ENTRIES = 1 << 20
"""Size of the fixed memory in 32-bit numbers, enough for the largest captured pass."""

MAX_CACHED = 1024
"""Maximum number of cached uploads."""

_KV_COPIES = [array.name for array in BATCH_ARRAYS].index("kv_copies")


@dataclass(frozen=True)
class TiledRows:
    """The tiles of a pass on the device; None: there are none of this kind."""

    narrow: RowTiles | None  # tiles of few rows, and of draft tokens
    parts: int  # parts of the longest text in narrow tiles
    splits: bool  # whether each of these parts has its own program
    wide: RowTiles | None  # tiles of prompts


def tiled_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    tiles: TiledRows,
    rule: ScoreRule = PLAIN,
    out: Tensor | None = None,
) -> Tensor:
    """Return attention of all rows in tiles, [rows, heads, dim]; `out` is given if values are narrower than queries."""
    result = torch.empty_like(queries) if out is None else out
    if tiles.narrow is not None:
        workspace = None
        if tiles.splits:
            workspace = Workspace.allocate(tiles.narrow, result.shape[1], tiles.parts, result.shape[2])
        attend(queries, keys, values, metadata, tiles.narrow, result, workspace, rule)
    if tiles.wide is not None:
        attend(queries, keys, values, replace(metadata, has_trees=False), tiles.wide, result, None, rule)
    return result


@dataclass(frozen=True)
class UploadedPass:
    """A pass on the device, padded to its shape."""

    batch: ForwardBatch
    requests: Tensor  # int32 [rows], index of the row's request
    adapters: Tensor  # int32 [rows], slot of its adapter; empty if no row has one
    tiles: TiledRows
    is_fixed: bool  # whether its arrays are in the fixed memory, so that a capture may read them
    states: UploadedStates | None = None  # plan of the recurrent layers; None: there are none


class PassUpload:
    """Device memory for the arrays of passes: fixed memory for captured passes, and memory that grows as needed."""

    def __init__(self, device: torch.device) -> None:
        self._fixed = Upload(device, FIXED_ENTRIES)
        self._variable = Upload(device, 1 << 14)
        # By shape, number of copied KV rows and of copied ring rows, which determine the addresses of all arrays
        self._cached: dict[tuple[PassShape, int, int], UploadedPass] = {}

    def send(
        self, batch: ForwardBatch, layout: Layout, spare_slot: int, plan: Sequence[Piece] = ()
    ) -> UploadedPass:
        """Start the copy of `batch` (on the CPU) to the device; return the arrays there.

        Padding rows write to `spare_slot`. `plan` are the arrays of recurrent layers.
        """
        shape = layout.shape
        pieces = padded_pieces(batch, shape.sizes(batch.arrays.sizes), spare_slot)
        # Copies come last: their number is not part of the shape, and must not shift the other arrays.
        copies = np.array(batch.ring_copies, dtype=np.int32).reshape(-1, 2)
        moves = [pieces.pop(_KV_COPIES), Piece(copies, copies.shape, 0)]
        layout_arrays = [
            (layout.requests, shape.rows),
            (layout.adapters, shape.rows if shape.has_adapters else 0),
            *((array, shape.narrow_tiles) for array in layout.narrow),
            *((array, shape.wide_tiles) for array in layout.wide),
        ]
        pieces += [*(Piece(array, (length,), 0) for array, length in layout_arrays), *plan]
        cached = self._cached.get(key := (shape, len(moves[0].source), len(copies)))
        if cached is not None:
            self._fixed.copy([*pieces, *moves])
            return cached
        _, num_entries = array_offsets(tuple(piece.shape for piece in (*pieces, *moves)))
        is_fixed = num_entries <= FIXED_ENTRIES
        upload = self._fixed if is_fixed else self._variable
        *arrays, kv_copies, ring_copies = upload.copy([*pieces, *moves])
        # In the order of `pieces`: arrays of the batch, of the layout, of recurrent layers
        plan_start = len(pieces) - len(plan)
        layout_start = plan_start - len(layout_arrays)
        uploaded = [*arrays[:_KV_COPIES], kv_copies, *arrays[_KV_COPIES:layout_start]]
        requests, adapters, *tiles = arrays[layout_start:plan_start]
        result = UploadedPass(
            as_batch(batch, uploaded),
            requests,
            adapters,
            TiledRows(
                RowTiles(tiles[0], tiles[1], tiles[2], shape.narrow_rows) if shape.narrow_tiles else None,
                shape.parts,
                shape.splits,
                RowTiles(tiles[3], tiles[4], tiles[5], shape.wide_rows) if shape.wide_tiles else None,
            ),
            is_fixed,
            UploadedStates.of(arrays[plan_start:], plan, ring_copies) if plan else None,
        )
        if is_fixed and shape.is_decode and len(self._cached) < MAX_CACHED:
            self._cached[key] = result
        return result
