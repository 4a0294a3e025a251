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
    """Memory of KV rows, those of the decoder and of drafters, in pages; the package `kv` assigns the pages."""

    @property
    def spec(self) -> PageSpec: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def bytes_per_row(self) -> int:
        """Return the bytes of one token's KV rows, of the decoder and of drafters."""

    def arrays(self, name: str) -> tuple[Tensor, Tensor]:
        """Return keys and values of the rows named `name`, by layer, in the backend's layout, without a copy."""

    def move(self, copies: Tensor) -> None:
        """Copy the KV rows of tokens; `copies` is int32 [copies, 2], (from, to). All are read before any is written."""


@dataclass(frozen=True)
class HeadInput:
    """Input of a draft head's pass.

    Rows are laid out like those of a target pass. The row of token t writes the KV slot of t, and reads the token and
    the features of position t - 1. DFlash has two kinds of passes: over committed tokens, whose rows store the features
    of t, and over a block of draft tokens, whose rows read only their tokens (`are_own`, empty features).
    """

    arrays: BatchArrays  # as of a forward batch; `logit_rows` are the rows with output; `kv_copies` is empty
    starts: Ints  # int32 [requests], first KV row visible to the request's rows
    features: States  # [rows, feature width]; with `are_own`, [rows, hidden size]
    are_own: bool  # whether the features are states of the head itself, not of the target


@dataclass(frozen=True)
class HeadOutput:
    """Output of a draft head's pass."""

    logits: Tensor  # float32 [logit rows, draft vocabulary]
    states: Tensor  # [logit rows, hidden size], features for the next row
    is_cold: bool = False  # whether the pass compiled or captured something, so that its time is not typical


@dataclass(frozen=True)
class Unsettled:
    """Texts whose last tokens a pass in flight decides: their draft chains, and the tokens that the pass draws.

    A draft token is committed if it and all draft tokens before it equal the pass's draws. One more drawn token
    follows.
    """

    drawn: Tensor  # int64, on the device: the token drawn after every row of the pass
    first_rows: Ints  # int32 [requests], index in `drawn` of each newest token's row; its draft's rows follow
    drafted: Tensor  # int64, on the device: draft tokens
    draft_indices: Ints  # int32 [requests, longest draft], indices into `drafted`; -1: padding
    row_ends: Ints  # int32 [requests], one past the last reserved KV row


@dataclass(frozen=True)
class ChainStop:
    """When a chain ends early, given the head's confidence in its tokens."""

    edges: NDArray[np.float32]  # [classes - 1], bounds between confidence classes
    rates: NDArray[np.float32]  # [requests, classes], acceptance rate by class
    # [requests, steps]; a chain ends when the probability that all its tokens are accepted falls below this
    least: NDArray[np.float32]


@dataclass(frozen=True)
class ChainPlan:
    """Chains to draft after the newest tokens of some texts, each token from the head's own states."""

    lengths: Ints  # int32 [requests], text lengths
    steps: Ints  # int32 [requests], number of draft tokens
    records: Records  # [requests], sampling parameters, and noise key stems of *coupled*
    token_ids: Ints | None  # int32 [draft vocabulary], the target's ids of the head's tokens; None: identical
    vocab_size: int  # only ids below this can be sampled
    unsettled: Unsettled | None = None  # texts that a pass in flight extends; None: the lengths are final
    stop: ChainStop | None = None  # only for runners with `stops`, which then return their confidence


@dataclass(frozen=True)
class PendingChains:
    """Chains that are being drafted on a device."""

    tokens: HostCopy  # int64, the target's ids; -1 where logits were not finite
    token_indices: Sequence[Sequence[int]]  # for each request, the indices of its tokens in `tokens`


class KnownChains(NamedTuple):
    """Chains of some requests, on the host."""

    tokens: Sequence[Sequence[int]]  # [requests][tokens], the target's ids
    confidence: Sequence[Sequence[float]] | None = None  # of each token; None: the plan has no stop
    is_cold: bool = False  # whether the chains are empty only because kernels are still being compiled


Chains = KnownChains | PendingChains
"""The chain of every request."""


@dataclass(frozen=True)
class HeadCall:
    """Rows that a head runs, and the plan of the chains to draw, if any.

    - A head that drafts token by token (EAGLE, MTP) gets the rows up to each newest token, with the target's states.
      It returns the last row's output.
    - For `Unsettled` texts, there is a row for every token that may be committed. The token id -1 - i refers to
      `Unsettled.drawn[i]`. `logit_rows` has the first of these rows.
    - A head that drafts all positions at once (DFlash, P-EAGLE) has one logit row per position, in order.
    """

    rows: HeadInput
    store: KvStore
    plan: ChainPlan | None = None
    context: HeadInput | None = None  # DFlash: rows of committed tokens, which are stored first


class RowsRunner(Protocol):
    """Runs a head or an exit that has its own KV rows in the pages of a decoder's store."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def is_ready(self) -> bool:
        """Return whether all kernels that the runner has requested are compiled; until then its chains are empty."""

    def draft(self, call: HeadCall) -> "HeadOutput | Chains":
        """Run the rows, and return the planned chains.

        Without a plan, or if the runner draws no chains, return logits and states.

        A chain ends where logits are not finite. The host does not wait for a device. An exit (`HeadFactory.exit`)
        stores the features of committed tokens, as DFlash does. Its other rows read only their tokens, pass through the
        decoder's layers, which read the decoder's KV rows, and return no states.
        """


class HeadRunner(RowsRunner, Protocol):
    """A draft head loaded for a decoder."""

    spec: HeadSpec
    drafts_early: bool  # whether plans may have `unsettled` texts
    stops: bool  # whether plans may have a `stop`

    def markov_embeddings(self, tokens: Sequence[int]) -> Tensor:
        """Return a Markov head's (DSpark) embedding of these tokens: float32 [tokens, rank]."""

    def logits_after(self, tokens: Sequence[int], logits: Tensor, states: Tensor) -> Tensor:
        """Return the logits of positions of a block, given the token before each: float32 [tokens, draft vocabulary].

        `logits` and `states` are the head's output for the same positions. DSpark adds the logits of its Markov head;
        DFlash2 scores the best tokens and excludes all others.
        """


def head_output(runner: RowsRunner, rows: HeadInput, store: KvStore) -> HeadOutput:
    """Run rows without a plan; return logits and states of the logit rows."""
    output = runner.draft(HeadCall(rows, store))
    assert isinstance(output, HeadOutput)
    return output


@dataclass(frozen=True)
class MedusaCall:
    """Input of Medusa heads, and the chains to draw if there is a plan."""

    states: Tensor  # [rows, hidden], last hidden states after the final norm
    plan: ChainPlan | None = None


class MedusaRunner(Protocol):
    """Runs Medusa heads, which read only hidden states, have no KV rows, and draft one token each."""

    spec: HeadSpec

    @property
    def weight_bytes(self) -> int: ...

    def draft(self, call: MedusaCall) -> HeadOutput | Chains:
        """Return the planned chains: for each row, one token from each of the first heads.

        Without a plan, or if the runner draws no chains, return logits [rows, heads, draft vocabulary], and states.
        """


class HeadFactory(Protocol):
    """Loads heads for a decoder, in its number format. Heads without embedding or output matrix use the decoder's."""

    def head(self, head: Head, row_name: str) -> HeadRunner:
        """Load a head that fits the decoder; `row_name` is the name of its KV rows in the store."""

    def medusa(self, head: Head) -> MedusaRunner: ...

    def exit(self, more: Checkpoint, layer: int, row_name: str) -> RowsRunner | None:
        """Load an exit: the decoder's first `layer` layers, then another checkpoint's layer and final norm.

        The first layers use the decoder's KV rows; `row_name` is the name of the exit's own. None: the backend cannot
        share KV rows.
        """


@dataclass(frozen=True)
class DecodeSize:
    """A decoding pass to prepare: how many requests it has, and how long their texts are."""

    requests: int
    length: int  # computed tokens of each request
    kernels: int = 0  # identifies the kernels that are launched: equal for sizes that launch the same


class Decoder(Protocol):
    """A loaded model. It has only weights; every pass is given a KV store."""

    config: ModelConfig

    @property
    def is_shape_invariant(self) -> bool:
        """Return whether a row's result is the same in any pass, so that drafts cannot change a text."""

    @property
    def device(self) -> torch.device: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of the layers' weights, without embedding, output matrix and final norm."""

    def with_layers(self, layers: Sequence[int]) -> "Decoder":
        """Return a decoder that runs only these layers, and shares this one's weights."""

    def beside(self, checkpoint: Checkpoint) -> "Decoder":
        """Return a decoder with another checkpoint's layers, and this one's embedding, head and final norm.

        4-bit blocks stay packed if the backend has kernels for them.
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
        """Return the sizes of what recurrent layers store; None: there are none."""

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> KvStore:
        """Allocate memory for this decoder's KV rows, the `extra` ones of drafters, and states of recurrent layers."""

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> Sequence[DecodeSize]:
        """Return the passes to prepare at the start, because their first run is slow; likely ones first.

        The passes have up to `requests` requests with texts of up to `length` tokens and `rows` new rows each. Empty:
        no preparation is needed.
        """

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        """Run one pass over a batch on the CPU; copy and write KV rows as the batch says.

        The store must come from this decoder, or have the same rows.
        """
