"""Input and output of a forward pass.

`ForwardBatch` documents the arrays of a batch. `BATCH_ARRAYS` defines their sizes and padding, from which batch memory,
staging and the checks of the CPU kernels' bindings follow. A new array is declared here and in native/batch.h; code in
speculation/layout.py fills it.
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
"""Maximum draft tokens per request and step: one bit each in a 64-bit ancestor mask."""

MASK_WORDS = (MAX_DRAFT_NODES + 63) // 64
"""64-bit words of an ancestor mask."""

SHARE_PART = 128
"""KV rows per part of `ForwardOutput.shares`."""

Ints = NDArray[np.int32]


class Tap(NamedTuple):
    """A point between layers of the decoder, whose hidden states can be requested."""

    layer: int  # number of layers before the point; 0: the embedding
    normed: bool = False  # after the final norm; only for the last layer


class BatchSizes(NamedTuple):
    """Sizes of a batch's arrays."""

    rows: int
    requests: int
    pages: int  # in the longest block table
    logit_rows: int  # rows whose logits are returned
    kv_copies: int
    hidden_rows: int = 0  # rows whose hidden states are returned

    @property
    def num_words(self) -> int:
        """Return the number of 32-bit words of all arrays."""
        return sum(array.num_words(self) for array in BATCH_ARRAYS)


class Padding(Enum):
    """Value of the entries that a backend adds to pad an array."""

    ZERO = auto()
    SPARE_SLOT = auto()  # a KV row that is never read
    NUM_ROWS = auto()  # number of rows before padding


class BatchArray(NamedTuple):
    """Layout of one array of a batch."""

    name: str  # name in `ForwardBatch` and `BatchArrays`
    shape: Callable[[BatchSizes], tuple[int, ...]]
    padding: Padding = Padding.ZERO
    words: int = 1  # 32-bit words per number: 2 for int64

    def num_words(self, sizes: BatchSizes) -> int:
        """Return the number of 32-bit words of the array."""
        return prod(self.shape(sizes)) * self.words


BATCH_ARRAYS = (
    # The only array of 64-bit words comes first, so that they are aligned.
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
"""All arrays, in the order of `BatchArrays`."""


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
    def views_of(memory: Ints, sizes: BatchSizes) -> "BatchArrays":
        """Return arrays of these sizes as consecutive views of one block of memory."""
        views: list[Any] = []
        start = 0
        for array in BATCH_ARRAYS:
            end = start + array.num_words(sizes)
            words = memory[start:end]
            views.append((words.view(np.int64) if array.words == 2 else words).reshape(array.shape(sizes)))
            start = end
        return BatchArrays(*views)


class RequestChunks(NamedTuple):
    """States and rings of recurrent layers that a request's rows read and write."""

    begin: int  # position of the request's first row
    run: int  # number of rows of committed tokens; the rows of draft tokens follow
    # The chunk of position `begin`, whose state is read. Its ring has the rows of its positions before `begin`.
    read: Chunk
    # Later chunks that the pass enters, whose states it writes. The ring of the newest chunk receives its new rows.
    entered: tuple[Chunk, ...]

    @property
    def newest(self) -> Chunk:
        """The chunk of the last committed row."""
        return self.entered[-1] if self.entered else self.read


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of one target pass: prompt chunks, plain tokens, chains and trees of many requests, without padding.

    The rows of a request are consecutive: committed tokens by position, then draft tokens, parents before children.

    A row attends to the first `prefix_lens` KV rows of its request, and to later rows whose bit is set in its ancestor
    mask. Bit i is KV row `prefix_lens + i`; a node's own bit is set. A committed token is inside its own prefix and has
    an empty mask.
    """

    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows], rotary position of the token once committed
    slots: Tensor  # int32 [rows], physical KV row to write (page * page size + offset)
    prefix_lens: Tensor  # int32 [rows]
    ancestor_masks: Tensor  # int64 [rows, MASK_WORDS]
    row_starts: Tensor  # int32 [requests + 1], rows of request r are row_starts[r] : row_starts[r + 1]
    block_tables: Tensor  # int32 [requests, pages], in logical order; unused entries 0
    kv_lens: Tensor  # int32 [requests], number of logical KV rows visible to any row of the request
    logit_rows: Tensor  # int32 [logit rows], rows whose logits are returned, in this order
    kv_copies: Tensor  # int32 [copies, 2], (from, to) physical KV rows; executed first
    # int32 [hidden rows], rows whose hidden states are returned, in this order
    hidden_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    taps: tuple[Tap, ...] = ()  # points at which these hidden states are read
    # int64, on the decoder's device: tokens drawn by the previous pass. The token id -1 - i refers to entry i.
    drawn_before: Tensor | None = None
    # [requests], adapter slots, on the host; 0, or an empty tuple: the base model
    adapters: tuple[int, ...] = ()
    # Whether block tables leave out pages of a text. KV rows are then numbered without them, unlike positions.
    has_gaps: bool = False
    wants_shares: bool = False  # whether the pass returns `shares`; only for passes with one row per request
    # For recurrent layers, on the host; empty: there are none
    chunks: tuple[RequestChunks, ...] = ()  # [requests]
    ring_copies: tuple[tuple[int, int], ...] = ()  # (from, to) physical rows of rings; executed first

    @staticmethod
    def of(arrays: BatchArrays, taps: tuple[Tap, ...] = ()) -> "ForwardBatch":
        """Return a batch on the CPU whose tensors share the memory of these arrays."""
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays._asdict().items()}
        batch = ForwardBatch(**tensors, taps=taps)
        batch.__dict__["arrays"] = arrays  # fills the cached property, so that tensors are not converted back
        return batch

    def after(self, drawn: Tensor) -> "ForwardBatch":
        """Return the batch of a pass that reads `drawn`, the tokens drawn by the previous pass."""
        batch = object.__new__(ForwardBatch)  # `replace` would lose the cached `arrays`
        batch.__dict__.update(self.__dict__, drawn_before=drawn)
        return batch

    @cached_property
    def arrays(self) -> BatchArrays:
        """Return NumPy views of the batch's memory; only for a batch on the CPU."""
        return BatchArrays(*(getattr(self, name).numpy() for name in BatchArrays._fields))


class ConcatenatedStates(Mapping[Tap, Tensor]):
    """Hidden states by tap, stored in one array in the order of the taps: `concatenated_states` needs no copy."""

    __slots__ = ("states", "taps")

    def __init__(self, taps: Sequence[Tap], states: NDArray[np.float32]) -> None:
        self.taps = tuple(taps)
        self.states = states  # [rows, taps * size]

    def __getitem__(self, tap: Tap) -> Tensor:
        if tap not in self.taps:
            raise KeyError(tap)
        size = self.states.shape[1] // len(self.taps)
        index = self.taps.index(tap)
        return torch.from_numpy(self.states[:, index * size : (index + 1) * size])

    def __iter__(self) -> Iterator[Tap]:
        return iter(self.taps)

    def __len__(self) -> int:
        return len(self.taps)


def concatenated_states(hidden: Mapping[Tap, Tensor], taps: tuple[Tap, ...]) -> States:
    """Return each row's states at several taps, concatenated, [rows, taps * size]."""
    if isinstance(hidden, ConcatenatedStates) and hidden.taps == taps:
        return hidden.states
    return torch.cat([hidden[tap] for tap in taps], dim=-1)


def num_states(hidden: Mapping[Tap, Tensor]) -> int:
    """Return the number of rows with hidden states."""
    return len(hidden.states if isinstance(hidden, ConcatenatedStates) else next(iter(hidden.values()), ()))


def check_taps(taps: Iterable[Tap], num_layers: int) -> None:
    """Raise `ValueError` for taps that a decoder of this depth does not have."""
    for tap in taps:
        if not 0 <= tap.layer <= num_layers:
            raise ValueError(
                f"there are no hidden states after layer {tap.layer}: the model has {num_layers} layers"
            )
        if tap.normed and tap.layer != num_layers:
            raise ValueError("only hidden states after the last layer can be taken after the final norm")


def check_shares(batch: ForwardBatch) -> None:
    """Raise `ValueError` if the batch wants shares of attention and a request has not exactly one row."""
    if batch.wants_shares and len(batch.token_ids) != len(batch.kv_lens):
        raise ValueError("shares of attention are returned only for passes with one row per request")


def num_share_parts(batch: ForwardBatch) -> int:
    """Return the number of parts of the longest text."""
    return -(-int(batch.arrays.kv_lens.max(initial=0)) // SHARE_PART)


def resolve_ids(token_ids: Tensor, drawn: Tensor) -> Tensor:
    """Return token ids with id -1 - i replaced by `drawn[i]`, or by 0 if the previous pass drew no token there."""
    picked = drawn[(-1 - token_ids).clamp(min=0).long()].clamp(min=0)
    return torch.where(token_ids < 0, picked.to(token_ids.dtype), token_ids)


@dataclass(frozen=True)
class ForwardOutput:
    """Output of a target pass."""

    logits: Tensor  # float32 [len(logit_rows), vocab]
    hidden: Mapping[Tap, Tensor]  # [len(hidden_rows), hidden size] per tap of the batch
    is_cold: bool = False  # whether the pass compiled or captured something, so that its time is not typical
    # If wanted, float32 [requests, parts]: how much of a request's attention goes to each part of its KV rows. A sum
    # over all heads of layers without a sliding window; each head has 1 in total, and attention sinks do not count.
    # With several ranks, over the heads of the first.
    shares: Tensor | None = None
