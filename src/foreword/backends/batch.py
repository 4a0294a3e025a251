"""Input and output of a forward pass.

Every array of a batch is declared here once: `ForwardBatch` documents it, `BATCH_ARRAYS` defines its size and
padding. Batch memory, staging and the checks of the CPU kernels' bindings follow from that. A new array is declared
here and in native/batch.h, and filled in speculation/layout.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.kv.chunks import Chunk
from foreword.kv.states import States

MAX_DRAFT_NODES = 64
"""Maximum draft nodes per request and step: one bit each in an int64 ancestor mask."""

MASK_WORDS = (MAX_DRAFT_NODES + 63) // 64


Ints = NDArray[np.int32]


class Tap(NamedTuple):
    """A position in the decoder whose hidden states can be requested."""

    layer: int  # residual stream after this many layers; 0 is the embedding
    normed: bool = False  # after the final norm; only for the last layer


class BatchSizes(NamedTuple):
    """Sizes of a batch."""

    rows: int
    requests: int
    pages: int  # in the longest block table
    logit_rows: int
    kv_copies: int
    hidden_rows: int = 0

    @property
    def entries(self) -> int:
        return sum(array.entries(self) for array in BATCH_ARRAYS)


class Padding(Enum):
    """Value of entries that a backend adds to reach a round size."""

    ZERO = auto()
    SPARE_SLOT = auto()  # a KV row that is never read
    NUM_ROWS = auto()  # one past the last real row


class BatchArray(NamedTuple):
    """Layout of one array of a batch."""

    name: str  # name in `ForwardBatch` and `BatchArrays`
    shape: Callable[[BatchSizes], tuple[int, ...]]
    padding: Padding = Padding.ZERO
    words: int = 1  # 32-bit words per number: 2 for int64

    def entries(self, sizes: BatchSizes) -> int:
        return prod(self.shape(sizes)) * self.words


BATCH_ARRAYS = (
    # first, so that 64-bit words are aligned
    BatchArray("ancestor_masks", lambda n: (n.rows, MASK_WORDS), words=2),
    BatchArray("token_ids", lambda n: (n.rows,)),
    BatchArray("positions", lambda n: (n.rows,)),
    BatchArray("slots", lambda n: (n.rows,), Padding.SPARE_SLOT),
    BatchArray("prefix_lens", lambda n: (n.rows,)),
    BatchArray("row_starts", lambda n: (n.requests + 1,), Padding.NUM_ROWS),
    BatchArray("block_tables", lambda n: (n.requests, n.pages)),
    BatchArray("kv_lens", lambda n: (n.requests,)),
    BatchArray("logit_rows", lambda n: (n.logit_rows,)),
    BatchArray("kv_copies", lambda n: (n.kv_copies, 2), Padding.SPARE_SLOT),
    BatchArray("hidden_rows", lambda n: (n.hidden_rows,)),
)
"""Array names in the order of `BatchArrays`."""


class BatchArrays(NamedTuple):
    """The arrays of a batch in NumPy, which is faster to access; shapes as in `ForwardBatch`."""

    ancestor_masks: NDArray[np.int64]
    token_ids: Ints
    positions: Ints
    slots: Ints
    prefix_lens: Ints
    row_starts: Ints
    block_tables: Ints
    kv_lens: Ints
    logit_rows: Ints
    kv_copies: Ints
    hidden_rows: Ints

    @property
    def sizes(self) -> BatchSizes:
        return BatchSizes(
            rows=len(self.token_ids),
            requests=len(self.kv_lens),
            pages=self.block_tables.shape[1],
            logit_rows=len(self.logit_rows),
            kv_copies=len(self.kv_copies),
            hidden_rows=len(self.hidden_rows),
        )

    @staticmethod
    def carved(memory: Ints, sizes: BatchSizes) -> "BatchArrays":
        """Return consecutive views of one block of memory."""
        views: list[Any] = []
        start = 0
        for array in BATCH_ARRAYS:
            end = start + array.entries(sizes)
            part = memory[start:end]
            views.append((part.view(np.int64) if array.words == 2 else part).reshape(array.shape(sizes)))
            start = end
        return BatchArrays(*views)


class RequestChunks(NamedTuple):
    """States and rings of recurrent layers that a request's rows read and write."""

    begin: int  # position of the request's first row
    run: int  # committed tokens; draft nodes follow
    # The chunk that is read. Its ring has the rows from `read.start` to `begin`; new ones of its positions follow.
    read: Chunk
    # Later chunks whose states are written. The ring of the last one gets the newest rows.
    entered: tuple[Chunk, ...]


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of one target pass: prompt chunks, plain tokens, chains and trees of many requests, ragged.

    The rows of a request are consecutive, in attention order. A row attends to the first `prefix_lens` KV rows of its
    request, and to later rows whose bit is set in its ancestor mask. Bit i is KV row `prefix_lens + i`; a node's own
    bit is set. A committed token is inside its own prefix and has an empty mask.
    """

    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows], rotary position of the token once committed
    slots: Tensor  # int32 [rows], physical KV row to write (page * page size + offset)
    prefix_lens: Tensor  # int32 [rows]
    ancestor_masks: Tensor  # int64 [rows, MASK_WORDS]
    row_starts: Tensor  # int32 [requests + 1], rows of request r are row_starts[r] : row_starts[r + 1]
    block_tables: Tensor  # int32 [requests, pages], in logical order; unused entries 0
    kv_lens: Tensor  # int32 [requests], number of logical KV rows visible to any row of the request
    logit_rows: Tensor  # int32 [wanted], rows whose logits are returned, in this order
    kv_copies: Tensor  # int32 [copies, 2], (from, to) physical KV rows; executed first
    hidden_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))  # int32 [wanted]
    taps: tuple[Tap, ...] = ()  # where the hidden states of `hidden_rows` are taken
    # int64 [drawn], on the decoder's device: tokens drawn by the previous pass. The id -1 - i refers to entry i.
    drawn_before: Tensor | None = None
    # [requests], adapter slots, on the host; 0 or empty: the base model
    adapters: tuple[int, ...] = ()
    # recurrent layers, on the host; empty: there are none
    chunks: tuple[RequestChunks, ...] = ()  # [requests]
    ring_copies: tuple[tuple[int, int], ...] = ()  # (from, to) physical rows of rings; executed first

    @staticmethod
    def of(arrays: BatchArrays, taps: tuple[Tap, ...] = ()) -> "ForwardBatch":
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays._asdict().items()}
        batch = ForwardBatch(**tensors, taps=taps)
        batch.__dict__["arrays"] = arrays  # cached: no conversion back from tensors
        return batch

    def after(self, drawn: Tensor) -> "ForwardBatch":
        """Return the batch for a pass that reads `drawn` from the previous pass."""
        batch = object.__new__(ForwardBatch)
        batch.__dict__.update(self.__dict__, drawn_before=drawn)
        return batch

    @cached_property
    def arrays(self) -> BatchArrays:
        """NumPy views of the batch's memory; only for a batch on the CPU."""
        return BatchArrays(*(getattr(self, name).numpy() for name in BatchArrays._fields))


class SideBySide(Mapping[Tap, Tensor]):
    """Hidden states of all taps in one row-major array, so that joining them needs no copy."""

    __slots__ = ("states", "taps")

    def __init__(self, taps: Sequence[Tap], states: NDArray[np.float32]) -> None:
        self.taps = tuple(taps)
        self.states = states  # [rows, taps * size]

    def __getitem__(self, tap: Tap) -> Tensor:
        if tap not in self.taps:
            raise KeyError(tap)
        size, place = self.states.shape[1] // len(self.taps), self.taps.index(tap)
        return torch.from_numpy(self.states[:, place * size : (place + 1) * size])

    def __iter__(self) -> Iterator[Tap]:
        return iter(self.taps)

    def __len__(self) -> int:
        return len(self.taps)


def joined_states(hidden: Mapping[Tap, Tensor], taps: tuple[Tap, ...]) -> States:
    """Concatenate each row's states at several taps, [rows, taps * size]."""
    if isinstance(hidden, SideBySide) and hidden.taps == taps:
        return hidden.states
    return torch.cat([hidden[tap] for tap in taps], dim=-1)


def num_states(hidden: Mapping[Tap, Tensor]) -> int:
    return len(hidden.states if isinstance(hidden, SideBySide) else next(iter(hidden.values()), ()))


def check_taps(taps: Iterable[Tap], num_layers: int) -> None:
    """Raise `ValueError` for taps that a decoder of this depth does not have."""
    for tap in taps:
        if not 0 <= tap.layer <= num_layers:
            raise ValueError(f"there are no hidden states after layer {tap.layer} of {num_layers}")
        if tap.normed and tap.layer != num_layers:
            raise ValueError("the final norm follows the last layer alone")


def known_ids(token_ids: Tensor, drawn: Tensor) -> Tensor:
    """Replace negative ids by the tokens of the previous pass; by any token if it drew none."""
    picked = drawn[(-1 - token_ids).clamp(min=0).long()].clamp(min=0)
    return torch.where(token_ids < 0, picked.to(token_ids.dtype), token_ids)


@dataclass(frozen=True)
class ForwardOutput:
    """Output of a target pass."""

    logits: Tensor  # float32 [len(logit_rows), vocab]
    hidden: Mapping[Tap, Tensor]  # [len(hidden_rows), hidden size] per tap of the batch
    is_cold: bool = False  # compiled or captured a graph, so that its time is not typical
