"""Uploads a pass to the device: the batch's arrays and the tiles of its rows, in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import BATCH_ARRAYS, ForwardBatch, Ints
from foreword.backends.cuda.kernels.attention import PLAIN, RowTiles, ScoreRule, Sight, Workspace, attend
from foreword.backends.cuda.layout import Layout, PassShape, Tiles
from foreword.backends.cuda.state_plan import UploadedStates
from foreword.backends.torch.staging import as_batch, padded_pieces
from foreword.backends.torch.upload import Piece, Upload, placed

FIXED_ENTRIES = 1 << 20
"""Size of the fixed memory in 32-bit numbers: the largest captured pass."""


MOST_KNOWN = 1024
"""Maximum number of cached uploads."""

_MOVES = [array.name for array in BATCH_ARRAYS].index("kv_copies")


@dataclass(frozen=True)
class TiledRows:
    """The rows of a pass in tiles."""

    narrow: RowTiles | None  # tiles of few rows
    parts: int  # parts of the longest text in narrow tiles
    splits: bool  # whether these parts have separate programs
    wide: RowTiles | None  # tiles of a prompt


def attended(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sight: Sight,
    tiles: TiledRows,
    rule: ScoreRule = PLAIN,
    out: Tensor | None = None,
) -> Tensor:
    """Return attention of all tiled rows, [rows, heads, dim]; into `out` where values are narrower than queries."""
    found = torch.empty_like(queries) if out is None else out
    if tiles.narrow is not None:
        room = None
        if tiles.splits:
            room = Workspace.allocate(tiles.narrow, found.shape[1], tiles.parts, found.shape[2])
        attend(queries, keys, values, sight, tiles.narrow, found, room, rule)
    if tiles.wide is not None:
        attend(queries, keys, values, replace(sight, has_trees=False), tiles.wide, found, None, rule)
    return found


@dataclass(frozen=True)
class UploadedPass:
    """A pass on the device, padded to its shape."""

    batch: ForwardBatch
    requests: Tensor  # int32 [rows], index of the row's request
    adapters: Tensor  # int32 [rows], slot of its adapter; empty if no row has one
    tiles: TiledRows
    stays: bool  # whether all passes of its shape use the same memory
    states: UploadedStates | None = None  # what recurrent layers read and write


class PassUpload:
    """Memory for the arrays of passes; captured passes read from a fixed part of it."""

    def __init__(self, device: torch.device) -> None:
        self._fixed = Upload(device, FIXED_ENTRIES)
        self._growing = Upload(device, 1 << 14)
        # By shape and number of moves: such passes use the same memory, so that only its contents differ.
        self._known: dict[tuple[PassShape, int, int], UploadedPass] = {}

    def send(
        self, batch: ForwardBatch, layout: Layout, spare_slot: int, plan: Sequence[Piece] = ()
    ) -> UploadedPass:
        """Start the copy of `batch` (on the CPU). Padding rows write to `spare_slot`. `plan` is of recurrent layers."""
        shape = layout.shape
        pieces = padded_pieces(batch, shape.sizes(batch.arrays.sizes), spare_slot)
        # Moves come last: their number is not part of the shape, and must not shift other arrays.
        copies = np.array(batch.ring_copies, dtype=np.int32).reshape(-1, 2)
        moves = [pieces.pop(_MOVES), Piece(copies, copies.shape, 0)]
        more = [
            (layout.requests, shape.rows),
            (layout.adapters, shape.rows if shape.has_adapters else 0),
            *((array, shape.narrow_tiles) for array in _arrays(layout.narrow)),
            *((array, shape.wide_tiles) for array in _arrays(layout.wide)),
        ]
        pieces += [*(Piece(array, (room,), 0) for array, room in more), *plan]
        known = self._known.get(key := (shape, len(moves[0].source), len(copies)))
        if known is not None:
            self._fixed.copy([*pieces, *moves])
            return known
        stays = placed(tuple(piece.shape for piece in (*pieces, *moves)))[1] <= FIXED_ENTRIES
        *arrays, kv_copies, ring_copies = (self._fixed if stays else self._growing).copy([*pieces, *moves])
        own, planned = len(pieces) - len(more) - len(plan), len(pieces) - len(plan)
        uploaded = [*arrays[:_MOVES], kv_copies, *arrays[_MOVES:own]]
        requests, adapters, *tiles = arrays[own:planned]
        found = UploadedPass(
            as_batch(batch, uploaded),
            requests,
            adapters,
            TiledRows(
                _row_tiles(tiles[:3], shape.narrow_rows) if shape.narrow_tiles else None,
                shape.parts,
                shape.splits,
                _row_tiles(tiles[3:], shape.wide_rows) if shape.wide_tiles else None,
            ),
            stays,
            UploadedStates.of(arrays[planned:], ring_copies) if plan else None,
        )
        if stays and shape.is_decode and len(self._known) < MOST_KNOWN:
            self._known[key] = found
        return found


def _arrays(tiles: Tiles) -> tuple[Ints, Ints, Ints]:
    return tiles.first_rows, tiles.counts, tiles.requests


def _row_tiles(arrays: list[Tensor], rows: int) -> RowTiles:
    first_rows, counts, requests = arrays
    return RowTiles(first_rows, counts, requests, rows)
