"""The one explicit value that a target pass gets, and the one that it returns.

An array of the batch is declared here, once: `ForwardBatch` says what it means, `BATCH_ARRAYS` how large it is and
what padding holds. Batch memory, staging and the checks of the CPU kernels' bindings follow from that. A new array is
declared here and in native/batch.h, and filled in speculation/rows/layout.py.
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

from foreword.kv.states import States

MAX_DRAFT_NODES = 64
"""Draft nodes per request and step: one bit each in one int64 word of the ancestor mask."""

MASK_WORDS = (MAX_DRAFT_NODES + 63) // 64


Ints = NDArray[np.int32]


class Tap(NamedTuple):
    """A place in the decoder whose hidden states can be asked for."""

    layer: int  # the residual stream after this many layers; 0 is the embedding
    normed: bool = False  # after the final norm; only with the last layer


class BatchSizes(NamedTuple):
    """How large a batch is."""

    rows: int
    requests: int
    pages: int  # of the longest block table
    logit_rows: int
    kv_copies: int
    hidden_rows: int = 0

    @property
    def entries(self) -> int:
        """32-bit numbers in all arrays together."""
        return sum(array.entries(self) for array in BATCH_ARRAYS)


class Padding(Enum):
    """What entries hold that a backend adds to reach a round size."""

    ZERO = auto()
    SPARE_SLOT = auto()  # a KV row that is not read
    NUM_ROWS = auto()  # the end of the real rows


class BatchArray(NamedTuple):
    """How one array of a batch is laid out."""

    name: str  # in `ForwardBatch` and `BatchArrays`
    shape: Callable[[BatchSizes], tuple[int, ...]]
    padding: Padding = Padding.ZERO
    words: int = 1  # 32-bit words of one number: 2 for int64

    def entries(self, sizes: BatchSizes) -> int:
        """32-bit words in the whole array."""
        return prod(self.shape(sizes)) * self.words


BATCH_ARRAYS = (
    BatchArray("ancestor_masks", lambda n: (n.rows, MASK_WORDS), words=2),  # first, where 64 bits are aligned
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
"""In the order of `BatchArrays`."""


class BatchArrays(NamedTuple):
    """The arrays of a batch in numpy, which takes less time to look at; shapes as in `ForwardBatch`."""

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
        """Views of one stretch of memory, one array after the other."""
        views: list[Any] = []
        start = 0
        for array in BATCH_ARRAYS:
            end = start + array.entries(sizes)
            part = memory[start:end]
            views.append((part.view(np.int64) if array.words == 2 else part).reshape(array.shape(sizes)))
            start = end
        return BatchArrays(*views)


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of one target pass: prompt chunks, plain tokens, chains and trees of many requests, ragged.

    The rows of a request stand together, in the order in which they attend. A row sees the first
    `prefix_lens` KV rows of its request in full, and of the rows after those the ones whose bit is
    set in its ancestor mask (bit i is KV row `prefix_lens + i`, itself included). A committed token
    has itself inside its prefix and an empty mask.
    """

    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows], rotary position: the one the token has once it is committed
    slots: Tensor  # int32 [rows], physical KV row that the token writes (page * page size + offset)
    prefix_lens: Tensor  # int32 [rows]
    ancestor_masks: Tensor  # int64 [rows, MASK_WORDS]
    row_starts: Tensor  # int32 [requests + 1], rows of request r are row_starts[r] : row_starts[r + 1]
    block_tables: Tensor  # int32 [requests, pages of the longest or more], in logical order; unused entries 0
    kv_lens: Tensor  # int32 [requests], logical KV rows that any row of the request can see
    logit_rows: Tensor  # int32 [wanted], rows whose logits are returned, in this order
    kv_copies: Tensor  # int32 [copies, 2], (from, to) physical KV rows; done before anything else
    hidden_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))  # int32 [wanted]
    taps: tuple[Tap, ...] = ()  # where the hidden states of `hidden_rows` are taken
    # int64 [drawn], on the decoder's device: what the pass before has drawn. The id -1 - i stands for its entry i.
    drawn_before: Tensor | None = None
    # [requests], slot of each one's adapter, on the host; 0, or no entries at all: the model itself
    adapters: tuple[int, ...] = ()

    @staticmethod
    def of(arrays: BatchArrays, taps: tuple[Tap, ...] = ()) -> "ForwardBatch":
        """A batch that looks at the same memory."""
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays._asdict().items()}
        batch = ForwardBatch(**tensors, taps=taps)
        batch.__dict__["arrays"] = arrays  # known: it need not be made of the tensors again
        return batch

    def after(self, drawn: Tensor) -> "ForwardBatch":
        """The same arrays, of a pass that depends on the one that draws this."""
        batch = object.__new__(ForwardBatch)
        batch.__dict__.update(self.__dict__, drawn_before=drawn)
        return batch

    @cached_property
    def arrays(self) -> BatchArrays:
        """The same memory as numpy arrays; for a batch on the CPU."""
        return BatchArrays(*(getattr(self, name).numpy() for name in BatchArrays._fields))


class SideBySide(Mapping[Tap, Tensor]):
    """Hidden states that lie beside each other row by row, so that those of all taps together are no copy."""

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
    """[rows, taps * size], the states of a pass at several taps beside each other."""
    if isinstance(hidden, SideBySide) and hidden.taps == taps:
        return hidden.states
    return torch.cat([hidden[tap] for tap in taps], dim=-1)


def num_states(hidden: Mapping[Tap, Tensor]) -> int:
    """Rows of a pass whose states were kept."""
    return len(hidden.states if isinstance(hidden, SideBySide) else next(iter(hidden.values()), ()))


def check_taps(taps: Iterable[Tap], num_layers: int) -> None:
    """Refuse taps that a decoder of this many layers does not have."""
    for tap in taps:
        if not 0 <= tap.layer <= num_layers:
            raise ValueError(f"there are no hidden states after layer {tap.layer} of {num_layers}")
        if tap.normed and tap.layer != num_layers:
            raise ValueError("the final norm follows the last layer alone")


def known_ids(token_ids: Tensor, drawn: Tensor) -> Tensor:
    """Token ids with those in their place that the pass before has drawn; where it could draw none, any."""
    picked = drawn[(-1 - token_ids).clamp(min=0).long()].clamp(min=0)
    return torch.where(token_ids < 0, picked.to(token_ids.dtype), token_ids)


@dataclass(frozen=True)
class ForwardOutput:
    """What a target pass returns."""

    logits: Tensor  # float32 [len(logit_rows), vocab]
    hidden: Mapping[Tap, Tensor]  # [len(hidden_rows), hidden size] for every tap of the batch
    is_cold: bool = False  # the pass compiled or captured something: its time says nothing of later passes
