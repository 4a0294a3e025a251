"""Pads a batch and uploads it to a decoder's device in one copy, into fixed memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import BATCH_ARRAYS, BatchSizes, ForwardBatch, Ints, Padding
from foreword.backends.torch.upload import Piece, Upload


@dataclass(frozen=True)
class RequestGroup:
    """Requests with equal padded row counts, whose attention is computed together."""

    members: Tensor  # int32 [requests], indices of requests; padded with a request without rows
    query_rows: int  # padded rows per request
    kv_rows: int  # visible KV rows of the longest request, rounded up


@dataclass(frozen=True)
class StagedBatch:
    """A padded batch on the device.

    Padding rows belong to no request, write to an unused KV row, and are not read. Padding requests have neither rows
    nor KV; there is at least one.
    """

    batch: ForwardBatch  # its arrays are padded
    groups: tuple[RequestGroup, ...]  # each request with rows is in one of them
    num_logits: int  # number of real entries of `logit_rows`
    num_hidden: int  # number of real entries of `hidden_rows`


def padded_pieces(batch: ForwardBatch, sizes: BatchSizes, spare_slot: int) -> list[Piece]:
    """Return the arrays of a batch on the CPU as 32-bit words, with their padded sizes."""
    host = batch.arrays
    fills = {
        Padding.ZERO: 0,
        Padding.SPARE_SLOT: spare_slot,
        Padding.NUM_ROWS: len(host.token_ids),
    }
    pieces = []
    for spec in BATCH_ARRAYS:
        array: Ints = getattr(host, spec.name)
        *leading, last = spec.shape(sizes)
        pieces.append(Piece(array.view(np.int32), (*leading, last * spec.words), fills[spec.padding]))
    return pieces


def as_batch(batch: ForwardBatch, arrays: Sequence[Tensor]) -> ForwardBatch:
    """Return the batch with `arrays`, 32-bit words in the order of BATCH_ARRAYS, in place of its own."""
    padded: dict[str, Any] = {
        spec.name: words.view(torch.int64) if spec.words == 2 else words
        for spec, words in zip(BATCH_ARRAYS, arrays, strict=False)
    }
    return replace(batch, **padded)


class Staging:
    """Uploads padded batches to one decoder's device."""

    def __init__(self, device: torch.device, bucketed: bool, entries: int = 1 << 14) -> None:
        """`bucketed` rounds all sizes up to powers of two, so that few shapes occur.

        The initial memory has room for `entries` 32-bit numbers; it grows on demand.
        """
        self._bucketed = bucketed
        self._upload = Upload(device, entries)

    def stage(self, batch: ForwardBatch, page_size: int, spare_slot: int) -> StagedBatch:
        """Start the copy of a batch on the CPU; return it on the device. Padding rows write to `spare_slot`."""
        sizes = BatchSizes(*map(self.rounded, batch.arrays.sizes))
        pieces = padded_pieces(batch, sizes._replace(requests=sizes.requests + 1), spare_slot)
        groups = self._groups(batch, page_size)
        members = [np.array(numbers, dtype=np.int32) for numbers, _, _ in groups]
        arrays = self._upload.copy([*pieces, *(Piece(numbers, numbers.shape, 0) for numbers in members)])
        uploaded_groups = zip(arrays[len(pieces) :], groups, strict=True)
        return StagedBatch(
            batch=as_batch(batch, arrays),
            groups=tuple(
                RequestGroup(numbers, query_rows, kv_rows)
                for numbers, (_, query_rows, kv_rows) in uploaded_groups
            ),
            num_logits=len(batch.logit_rows),
            num_hidden=len(batch.hidden_rows),
        )

    def _groups(self, batch: ForwardBatch, page_size: int) -> list[tuple[list[int], int, int]]:
        """Return members, query rows and KV rows of every group: the fields of `RequestGroup`."""
        starts, kv_lens = batch.row_starts.tolist(), batch.kv_lens.tolist()
        by_query_rows: dict[int, list[int]] = {}
        for request in range(len(kv_lens)):
            if count := starts[request + 1] - starts[request]:
                by_query_rows.setdefault(self.rounded(count), []).append(request)
        groups = []
        for query_rows, members in sorted(by_query_rows.items()):
            kv_rows = max(kv_lens[request] for request in members)
            if self._bucketed:
                kv_rows = self.rounded(-(-kv_rows // page_size)) * page_size
            without_rows = self.rounded(len(kv_lens))
            padding = [without_rows] * (self.rounded(len(members)) - len(members))
            groups.append((members + padding, query_rows, kv_rows))
        return groups

    def rounded(self, count: int) -> int:
        """Return the padded size: with buckets, the smallest power of two that is not less; 0 for 0."""
        return 1 << (count - 1).bit_length() if self._bucketed and count else count
