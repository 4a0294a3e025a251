"""What every backend offers: a decoder, and stores for the KV of its passes."""

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
from foreword.kv.spec import PageSpec, RowSpec
from foreword.kv.states import States
from foreword.models.adapters import Lora
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head
from foreword.models.heads.spec import HeadSpec


class KvStore(Protocol):
    """The bytes of all kinds of KV rows, in pages; `kv/` decides who uses which page."""

    @property
    def spec(self) -> PageSpec:
        """The kinds of rows."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages that there is room for."""
        ...

    @property
    def page_size(self) -> int:
        """Rows in a page."""
        ...

    @property
    def bytes_per_row(self) -> int:
        """Memory of one token's rows of all kinds."""
        ...

    def arrays(self, name: str) -> tuple[Tensor, Tensor]:
        """Keys and values of one kind, layer by layer, in the backend's own layout; writing changes the store."""
        ...

    def move(self, copies: Tensor) -> None:
        """Copy rows (from, to) of all kinds together, int32 [copies, 2]; all are read before any is written."""
        ...


@dataclass(frozen=True)
class HeadInput:
    """What one pass of a draft head gets.

    Its rows are laid out as those of a target pass: the row of token t writes the KV slot of t. Beside the token it
    reads the features of position t - 1. A head that only attends to features (DFlash) has two kinds of passes: over
    committed tokens, where the row of t keeps the features of t, and over a block of draft tokens, which read their
    token alone (`are_own`, features of no numbers).
    """

    arrays: BatchArrays  # of a forward batch; `logit_rows` are the wanted rows, and no row is moved
    starts: Ints  # int32 [requests], KV rows before this one are seen by none of the request's rows
    features: States  # [rows, feature width]; where they are its own, [rows, hidden size]
    are_own: bool  # what it returned itself for the position before, instead of the target's hidden states


@dataclass(frozen=True)
class HeadOutput:
    """What a pass of a draft head returns."""

    logits: Tensor  # float32 [wanted, draft vocabulary]
    states: Tensor  # [wanted, hidden size], features for the row that comes next
    is_cold: bool = False  # the pass compiled or captured something: its time says nothing of later passes


@dataclass(frozen=True)
class Unsettled:
    """Texts whose last tokens a pass in flight decides: chains of draft tokens, and what it draws after each of them.

    A draft token that is what the pass draws itself becomes part of the text, if all before it do; then comes one more
    token that it draws.
    """

    drawn: Tensor  # int64, on the device: what the pass draws after every row that it judges
    first: Ints  # int32 [requests], the row of each one's newest token among these; its draft's follow
    drafted: Tensor  # int64, on the device
    places: Ints  # int32 [requests, longest draft], of each one's draft tokens among them; -1: it has no more
    ends: Ints  # int32 [requests], KV rows from these on are not reserved


@dataclass(frozen=True)
class ChainStop:
    """Where chains end, by the confidence of a head in its draft tokens."""

    edges: NDArray[np.float32]  # [classes - 1], of the confidence
    rates: NDArray[np.float32]  # [requests, classes], acceptance of draft tokens of a class
    # [requests, most steps], a chain ends where the probability that all its tokens are accepted is below this
    least: NDArray[np.float32]


@dataclass(frozen=True)
class ChainPlan:
    """Chains that a head drafts after the newest tokens of some texts, each token from the head's own states."""

    lengths: Ints  # int32 [requests], tokens of each text
    steps: Ints  # int32 [requests], draft tokens of each
    records: Records  # [requests], how each is drawn, with the noise of *coupled*
    token_ids: Ints | None  # int32 [draft vocabulary], the target's ids of the head's tokens; None: the same
    vocab_size: int  # ids below this can be drawn
    unsettled: Unsettled | None = None  # where each text ends: so many tokens after its length; None: there
    stop: ChainStop | None = None  # for a runner that `stops`, which then returns its confidence


@dataclass(frozen=True)
class PendingChains:
    """The chains of some requests while a device drafts them."""

    tokens: HostCopy  # int64, the target's ids; -1 where there is no number
    places: Sequence[Sequence[int]]  # of each request's tokens among them


class KnownChains(NamedTuple):
    """The chains of some requests."""

    tokens: Sequence[Sequence[int]]  # the target's ids
    confidence: Sequence[Sequence[float]] | None = None  # in each token; None: the plan has no stop


Chains = KnownChains | PendingChains
"""The chain of every request."""


@dataclass(frozen=True)
class HeadCall:
    """Rows that a head runs, and the chains that it draws from them if there is a plan.

    A head that drafts token by token (EAGLE, MTP) gets the rows up to each newest token, whose states are the target's,
    and wants the outcome of the last one. Where the plan's texts are `Unsettled`, there is a row for every token that
    each may gain, the id -1 - i standing for entry i of what is drawn, and the first one is wanted. A head that drafts
    all places at once (DFlash, P-EAGLE) has a wanted row for each place, in order.
    """

    rows: HeadInput
    store: KvStore
    plan: ChainPlan | None = None
    context: HeadInput | None = None  # rows of committed tokens that are kept first (DFlash)


class RowsRunner(Protocol):
    """What has KV rows of its own in the pages of a decoder's store."""

    @property
    def weight_bytes(self) -> int:
        """Memory of its own weights."""
        ...

    def draft(self, call: HeadCall) -> "HeadOutput | Chains":
        """Run the rows and return the planned chains, or logits without a plan, or where the runner draws no chains.

        A chain ends where there is no number; on a device the host waits for none. An exit (`HeadFactory.exit`) keeps
        what features say of committed tokens, as DFlash does. Its other rows read their token alone, go through the
        decoder's layers, on the decoder's KV rows, and return no states.
        """
        ...


class HeadRunner(RowsRunner, Protocol):
    """A draft head that was loaded beside a decoder."""

    spec: HeadSpec
    drafts_early: bool  # whether its chains may follow texts that are `Unsettled`; others get no such plan
    stops: bool  # whether its chains end where a plan's `stop` says so; others get no such plan

    def markov_before(self, tokens: Sequence[int]) -> Tensor:
        """The numbers that a Markov head (DSpark) has for these tokens: float32 [tokens, rank]."""
        ...

    def markov_after(self, before: Tensor) -> Tensor:
        """What it adds to the logits of the places after them: float32 [tokens, draft vocabulary]."""
        ...


def head_output(runner: RowsRunner, rows: HeadInput, store: KvStore) -> HeadOutput:
    """Return logits and states of the wanted rows."""
    output = runner.draft(HeadCall(rows, store))
    assert isinstance(output, HeadOutput)
    return output


@dataclass(frozen=True)
class MedusaCall:
    """States that Medusa's heads read, and the chains that they draw if there is a plan."""

    states: Tensor  # [rows, hidden], the last hidden states after the final norm
    plan: ChainPlan | None = None


class MedusaRunner(Protocol):
    """Heads that read hidden states alone and draft a token each. They keep no KV."""

    spec: HeadSpec

    @property
    def weight_bytes(self) -> int:
        """Memory of their own weights."""
        ...

    def draft(self, call: MedusaCall) -> HeadOutput | Chains:
        """Return the planned chains, a token of each of the first heads for every row.

        Without a plan, or where the runner draws no chains, return logits [rows, heads, draft vocabulary].
        """
        ...


class HeadFactory(Protocol):
    """Loads heads beside a decoder, in its numbers; it lends them the embedding and output matrix that they lack."""

    def head(self, head: Head, rows: str) -> HeadRunner:
        """Load a head that was fitted to the decoder's config; `rows` names its KV rows in the store."""
        ...

    def medusa(self, head: Head) -> MedusaRunner:
        """Load Medusa's heads."""
        ...

    def exit(self, more: Checkpoint, layer: int, rows: str) -> RowsRunner | None:
        """Load an exit: the decoder's first `layer` layers, then the one of another checkpoint and its final norm.

        The KV rows of the first are the decoder's own in the store, `rows` names those of the other. None: the backend
        runs such a decoder on KV rows of its own alone.
        """
        ...


@dataclass(frozen=True)
class DecodeSize:
    """Requests that decode in one pass, with texts of one length."""

    requests: int
    length: int  # tokens of each that are computed already


class Decoder(Protocol):
    """A loaded model. It holds weights only: every pass names the KV store that it uses."""

    config: ModelConfig

    @property
    def is_shape_invariant(self) -> bool:
        """Whether a row's numbers are the same whatever else is in the pass: then no draft can change a text."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        ...

    @property
    def layer_bytes(self) -> int:
        """Memory of the layers' weights, without the embedding, the output head and the last norm."""
        ...

    def with_layers(self, layers: Sequence[int]) -> "Decoder":
        """A decoder that runs only these layers of this one, with the same weights."""
        ...

    def beside(self, checkpoint: Checkpoint) -> "Decoder":
        """A decoder with the layers of another checkpoint, and this one's embedding, head and final norm.

        4-bit blocks stay as they are where the backend has kernels for them.
        """
        ...

    def followed_by(self, more: Checkpoint) -> "Decoder":
        """A decoder that runs this one's layers, then those of another checkpoint and that one's final norm."""
        ...

    @property
    def heads(self) -> HeadFactory:
        """Loads draft heads beside this decoder."""
        ...

    def set_adapter(self, slot: int, adapter: Lora | None) -> None:
        """What is added for the requests whose slot in a batch is this one, 1 or more; None takes it away.

        Raises `RequestError` where the backend runs no adapters.
        """
        ...

    def kv_rows(self) -> RowSpec:
        """What a token of this decoder keeps."""
        ...

    def new_kv_store(self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = ()) -> KvStore:
        """Memory for this decoder's rows and the `extra` ones, on its device."""
        ...

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> Sequence[DecodeSize]:
        """Passes to run at the start, because the first of their kind take longer; likely ones first.

        Of up to so many requests with texts of up to this length and `rows` new rows each. Empty: a pass takes as long
        the first time as ever.
        """
        ...

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        """One pass over all rows of `batch` (on the CPU); KV rows are moved and written as it says.

        The store is one that this decoder made, or one with the same rows.
        """
        ...
