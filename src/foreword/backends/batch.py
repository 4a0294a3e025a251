"""The one explicit value that a target pass gets, and the one that it returns."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_DRAFT_NODES = 64
"""Draft nodes per request and step: one bit each in one int64 word of the ancestor mask."""

MASK_WORDS = (MAX_DRAFT_NODES + 63) // 64


Ints = NDArray[np.int32]


class Tap(NamedTuple):
    """A place in the decoder whose hidden states can be asked for."""

    layer: int  # the residual stream after this many layers; 0 is the embedding
    normed: bool = False  # after the final norm; only with the last layer


class BatchArrays(NamedTuple):
    """The arrays of a batch in numpy, which takes less time to look at; shapes as in `ForwardBatch`."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    prefix_lens: Ints
    ancestor_masks: NDArray[np.int64]
    row_starts: Ints
    block_tables: Ints
    kv_lens: Ints
    logit_rows: Ints
    kv_copies: Ints
    hidden_rows: Ints


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of one target pass: prompt chunks, plain tokens, chains and trees of many requests, ragged.

    The rows of a request stand together, in the order in which they attend. A row sees the first
    `prefix_lens` KV rows of its request in full, and of the rows behind those the ones whose bit is
    set in its ancestor mask (bit i is KV row `prefix_lens + i`, itself included). A committed token
    has itself inside its prefix and an empty mask.
    """

    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows], rotary position: the one the token has once it is committed
    slots: Tensor  # int32 [rows], physical KV row that the token writes (page * page size + offset)
    prefix_lens: Tensor  # int32 [rows]
    ancestor_masks: Tensor  # int64 [rows, MASK_WORDS]
    row_starts: Tensor  # int32 [requests + 1], rows of request r are row_starts[r] : row_starts[r + 1]
    block_tables: Tensor  # int32 [requests, most pages], physical pages in logical order; unused entries 0
    kv_lens: Tensor  # int32 [requests], logical KV rows that any row of the request can see
    logit_rows: Tensor  # int32 [wanted], rows whose logits are returned, in this order
    kv_copies: Tensor  # int32 [copies, 2], (from, to) physical KV rows; done before anything else
    hidden_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))  # int32 [wanted]
    taps: tuple[Tap, ...] = ()  # where the hidden states of `hidden_rows` are taken

    @cached_property
    def arrays(self) -> BatchArrays:
        """The same memory as numpy arrays; for a batch on the CPU."""
        return BatchArrays(*(getattr(self, name).numpy() for name in BatchArrays._fields))


def check_taps(taps: Iterable[Tap], num_layers: int) -> None:
    """Refuse taps that a decoder of so many layers does not have."""
    for tap in taps:
        if not 0 <= tap.layer <= num_layers:
            raise ValueError(f"there are no hidden states after layer {tap.layer} of {num_layers}")
        if tap.normed and tap.layer != num_layers:
            raise ValueError("the final norm follows the last layer alone")


@dataclass(frozen=True)
class ForwardOutput:
    """What a target pass returns."""

    logits: Tensor  # float32 [len(logit_rows), vocab]
    hidden: Mapping[Tap, Tensor]  # [len(hidden_rows), hidden size] for every tap of the batch
