"""Interface of a backend: a decoder, its KV stores, and runners of draft heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.acceptance.batch import Records
from foreword.acceptance.transfer import HostCopy
from foreword.backends.batch import BatchArrays, ForwardBatch, ForwardOutput, Ints
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.spec import PageSpec, RowSpec, StateSpec
from foreword.kv.states import States
from foreword.models.adapters import Lora
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import HeadSpec


class KvStore(Protocol):
    """Memory of all kinds of KV rows, in pages; `kv/` assigns the pages."""

    @property
    def spec(self) -> PageSpec: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token's rows of all kinds."""

    def arrays(self, name: str) -> tuple[Tensor, Tensor]:
        """Return keys and values of one kind by layer, in the backend's layout, without a copy."""

    def move(self, copies: Tensor) -> None:
        """Copy rows (from, to) of all kinds, int32 [copies, 2]; all are read before any is written."""


@dataclass(frozen=True)
class HeadInput:
    """Input of a draft head's pass.

    Rows are laid out like a target pass: the row of token t writes the KV slot of t, and reads the token and the
    features of position t - 1. A head that attends to features only (DFlash) has two kinds of passes: over committed
    tokens, whose rows store the features of t, and over a block of draft tokens, which read only their tokens
    (`are_own`, empty features).
    """

    arrays: BatchArrays  # of a forward batch; `logit_rows` are the wanted rows; no row is moved
    starts: Ints  # int32 [requests], first KV row visible to the request's rows
    features: States  # [rows, feature width]; if own, [rows, hidden size]
    are_own: bool  # features are the head's own states, not the target's


@dataclass(frozen=True)
class HeadOutput:
    """Output of a draft head's pass."""

    logits: Tensor  # float32 [wanted, draft vocabulary]
    states: Tensor  # [wanted, hidden size], features for the next row
    is_cold: bool = False  # compiled or captured a graph, so that its time is not typical


@dataclass(frozen=True)
class Unsettled:
    """Texts whose last tokens a pass in flight decides: their draft chains, and the pass's draws.

    A draft token that equals the pass's draw is committed if all before it are; one more drawn token follows.
    """

    drawn: Tensor  # int64, on the device: the draw after every judged row
    first_rows: Ints  # int32 [requests], index in `drawn` of each newest token's row; its draft's rows follow
    drafted: Tensor  # int64, on the device: draft tokens
    draft_indices: Ints  # int32 [requests, longest draft], indices into `drafted`; -1: padding
    row_ends: Ints  # int32 [requests], one past the last reserved KV row


@dataclass(frozen=True)
class ChainStop:
    """The condition on the head's confidence that ends a chain."""

    edges: NDArray[np.float32]  # [classes - 1], bounds of the confidence classes
    rates: NDArray[np.float32]  # [requests, classes], acceptance rate by class
    # [requests, steps], a chain ends if the probability that all its tokens are accepted falls below this
    least: NDArray[np.float32]


@dataclass(frozen=True)
class ChainPlan:
    """Chains to draft after the newest tokens of some texts, each token from the head's own states."""

    lengths: Ints  # int32 [requests], text lengths
    steps: Ints  # int32 [requests], draft tokens
    records: Records  # [requests], sampling parameters, with the noise of *coupled*
    token_ids: Ints | None  # int32 [draft vocabulary], the target's ids of the head's tokens; None: identical
    vocab_size: int  # ids below this can be sampled
    unsettled: Unsettled | None = None  # texts that a pass in flight extends; None: the lengths are final
    stop: ChainStop | None = None  # for runners that support it; they then return their confidence


@dataclass(frozen=True)
class PendingChains:
    """Chains being drafted on a device."""

    tokens: HostCopy  # int64, the target's ids; -1 if not finite
    token_indices: Sequence[Sequence[int]]  # for each request, the indices of its tokens in `tokens`


class KnownChains(NamedTuple):
    """Chains of some requests."""

    tokens: Sequence[Sequence[int]]  # the target's ids
    confidence: Sequence[Sequence[float]] | None = None  # of each token; None: the plan has no stop
    is_cold: bool = False  # empty while kernels are compiled, unlike later chains


Chains = KnownChains | PendingChains
"""The chain of every request."""


@dataclass(frozen=True)
class HeadCall:
    """Rows that a head runs, and the chains to draw from them if there is a plan.

    - A head that drafts token by token (EAGLE, MTP) gets the rows up to each newest token, with the target's states.
      It returns the last row's output.
    - For `Unsettled` texts there is a row for every token that each may gain. The id -1 - i refers to entry i of the
      draws. The first row's output is wanted.
    - A head that drafts all positions at once (DFlash, P-EAGLE) has one wanted row per position, in order.
    """

    rows: HeadInput
    store: KvStore
    plan: ChainPlan | None = None
    context: HeadInput | None = None  # rows of committed tokens to store first (DFlash)


class RowsRunner(Protocol):
    """A runner with its own KV rows in the pages of a decoder's store."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def is_ready(self) -> bool:
        """Return whether no kernel is being compiled that it waits for; until then its chains are empty."""

    def draft(self, call: HeadCall) -> "HeadOutput | Chains":
        """Run the rows; return the planned chains, or logits without a plan or if the runner draws no chains.

        A chain ends at a non-finite row. The host does not wait for a device. An exit (`HeadFactory.exit`) stores the
        features of committed tokens, as DFlash does; its other rows read only their tokens, pass through the
        decoder's layers on the decoder's KV rows, and return no states.
        """


class HeadRunner(RowsRunner, Protocol):
    """A draft head loaded for a decoder."""

    spec: HeadSpec
    drafts_early: bool  # whether plans may have `unsettled` texts
    stops: bool  # whether plans may have a `stop`

    def markov_before(self, tokens: Sequence[int]) -> Tensor:
        """Return a Markov head's (DSpark) embedding of these tokens: float32 [tokens, rank]."""

    def markov_after(self, before: Tensor) -> Tensor:
        """Return its addition to the logits of the next positions: float32 [tokens, draft vocabulary]."""


def head_output(runner: RowsRunner, rows: HeadInput, store: KvStore) -> HeadOutput:
    """Return logits and states of the wanted rows."""
    output = runner.draft(HeadCall(rows, store))
    assert isinstance(output, HeadOutput)
    return output


@dataclass(frozen=True)
class MedusaCall:
    """Input of Medusa heads, and the chains to draw if there is a plan."""

    states: Tensor  # [rows, hidden], last hidden states after the final norm
    plan: ChainPlan | None = None


class MedusaRunner(Protocol):
    """Heads that read only hidden states and draft one token each, without KV."""

    spec: HeadSpec

    @property
    def weight_bytes(self) -> int: ...

    def draft(self, call: MedusaCall) -> HeadOutput | Chains:
        """Return the planned chains: per row, one token of each of the first heads.

        Without a plan, or if the runner draws no chains, return logits [rows, heads, draft vocabulary].
        """


class HeadFactory(Protocol):
    """Loads heads for a decoder, in its number format, with its embedding and output matrix if they have none."""

    def head(self, head: Head, rows: str) -> HeadRunner:
        """Load a head that fits the decoder; `rows` names its KV rows in the store."""

    def medusa(self, head: Head) -> MedusaRunner: ...

    def exit(self, more: Checkpoint, layer: int, rows: str) -> RowsRunner | None:
        """Load an exit: the decoder's first `layer` layers, then another checkpoint's layer and final norm.

        The first layers use the decoder's KV rows; `rows` names the exit's own. None: the backend cannot share KV
        rows.
        """


@dataclass(frozen=True)
class DecodeSize:
    """Requests that decode in one pass, with texts of one length."""

    requests: int
    length: int  # computed tokens of each
    kernels: int = 0  # sizes with the same number launch the same kernels


class Decoder(Protocol):
    """A loaded model. It holds weights only; every pass names its KV store."""

    config: ModelConfig

    @property
    def is_shape_invariant(self) -> bool:
        """Return whether a row's result is independent of the rest of the pass, so that drafts cannot change a text."""

    @property
    def device(self) -> torch.device: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def layer_bytes(self) -> int:
        """Bytes of the layers' weights, without embedding, output head and last norm."""

    def with_layers(self, layers: Sequence[int]) -> "Decoder":
        """Return a decoder that runs only these layers, with shared weights."""

    def beside(self, checkpoint: Checkpoint) -> "Decoder":
        """Return a decoder with another checkpoint's layers, and this one's embedding, head and final norm.

        4-bit blocks are kept if the backend has kernels for them.
        """

    def followed_by(self, more: Checkpoint) -> "Decoder":
        """Return a decoder with this one's layers, then another checkpoint's layers and final norm."""

    @property
    def heads(self) -> HeadFactory: ...

    def set_adapter(self, slot: int, adapter: Lora | None) -> None:
        """Set or (None) remove the adapter of a slot (1 or more).

        Raise `RequestError` if the backend does not support adapters.
        """

    def kv_rows(self) -> RowSpec: ...

    def state_spec(self) -> StateSpec | None:
        """Return what its recurrent layers keep; None: there are none."""

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> KvStore:
        """Allocate memory for this decoder's rows, the `extra` ones, and states of recurrent layers."""

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> Sequence[DecodeSize]:
        """Return the passes to prepare at the start, because their first run is slow; likely ones first.

        They have up to `requests` requests, texts of up to `length` tokens, and `rows` new rows each. Empty: no
        preparation is needed.
        """

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        """Run one pass over a batch on the CPU; move and write KV rows as it says.

        The store must be made by this decoder, or have the same rows.
        """
