"""The decoder in plain torch, on CPU and CUDA."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Self

import torch
from torch import Tensor

from foreword.backends.batch import (
    ForwardBatch,
    ForwardOutput,
    Tap,
    check_shares,
    check_taps,
    num_share_parts,
    resolve_ids,
)
from foreword.backends.interface import DecodeSize, KvStore
from foreword.backends.memory import kv_rows, state_spec
from foreword.backends.support import require_supported
from foreword.backends.torch.adapters import on_device, pass_adapters
from foreword.backends.torch.attention import PagedKv
from foreword.backends.torch.head_factory import TorchHeads
from foreword.backends.torch.kv_store import TorchKvStore, move_rows
from foreword.backends.torch.recurrent import LayerStates
from foreword.backends.torch.recurrent_rows import RecurrentStore, RequestPass, request_passes
from foreword.backends.torch.stack import TorchStack
from foreword.backends.torch.staging import StagedBatch
from foreword.backends.torch.weights import DecoderWeights
from foreword.backends.weight_loader import M_co
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.spec import DECODER_ROWS, PageSpec, RowSpec, StateSpec
from foreword.models.adapters import Lora
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint


def silence_bfloat16_warning() -> None:
    """Suppress torch's warning about a slower path on CPUs without bfloat16."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")


class DescribedDecoder(ABC, Generic[M_co]):
    """Base class of decoders with torch tensors: config, weights and KV memory, but no passes."""

    _ring_dtype: torch.dtype | None = torch.float32  # of keys and updates in rings; None: that of the weights
    _move_rows: Callable[[Tensor, Tensor], None] = staticmethod(move_rows)

    def __init__(self, config: ModelConfig, weights: DecoderWeights[M_co]) -> None:
        self.config = config
        self.weights = weights  # public, since other decoders and heads share them
        self.weight_bytes, self.layer_bytes = weights.nbytes, weights.layer_bytes
        self._kv_rows = kv_rows(config, str(weights.dtype).removeprefix("torch."))
        self._adapters: dict[int, Lora] = {}  # by slot
        self._kind_indices = config.places

    def set_adapter(self, slot: int, adapter: Lora | None) -> None:
        """Set or (None) remove the adapter of a slot."""
        self._adapters.pop(slot, None)
        if adapter is not None:
            self._adapters[slot] = on_device(adapter, self.weights.dtype, self.device)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def with_layers(self, layers: Sequence[int]) -> Self:
        return self.with_weights(self.config.with_layers(layers), self.weights.with_layers(layers))

    def beside(self, checkpoint: Checkpoint) -> Self:
        return self.with_weights(checkpoint.config, self.weights.beside(checkpoint))

    def followed_by(self, checkpoint: Checkpoint) -> Self:
        config = self.config.followed_by(checkpoint.config)
        return self.with_weights(config, self.weights.followed_by(checkpoint))

    @abstractmethod
    def with_weights(self, config: ModelConfig, weights: DecoderWeights[M_co | Tensor]) -> Self:
        """Return a decoder of the same class and settings with another config and its weights."""

    def kv_rows(self) -> RowSpec:
        return self._kv_rows

    def state_spec(self) -> StateSpec | None:
        return state_spec(self.config, self.weights.dtype.itemsize)

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> TorchKvStore:
        """Allocate memory for this decoder's KV rows and states, and for the KV rows `extra`."""
        recurrent, dtype = None, self.weights.dtype
        if (spec := self.state_spec()) is not None:
            recurrent = RecurrentStore(spec, states, dtype, self.device, self._ring_dtype or dtype)
        rows = PageSpec.of(self.kv_rows(), extra)
        return TorchKvStore(rows, num_pages, page_size, self.device, self._move_rows, recurrent)

    def _checked_store(self, batch: ForwardBatch, store: KvStore) -> TorchKvStore:
        """Return the store; raise `ValueError` if it or the batch does not fit this decoder."""
        if not isinstance(store, TorchKvStore) or store.spec.decoder != self._kv_rows:
            raise ValueError("the KV store was made for another decoder")
        check_taps(batch.taps, self.config.num_layers)
        check_shares(batch)
        has_states = store.recurrent is not None and len(batch.chunks) == len(batch.kv_lens)
        if self.config.recurrent is not None and not has_states:
            raise ValueError("the batch or the KV store has no states, which recurrent layers need")
        return store


class TorchDecoder(DescribedDecoder):
    """A decoder in plain torch, with KV rows in the paged tensors of a `TorchKvStore`."""

    is_shape_invariant = False  # summation order of matrix products depends on the size

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        bucketed: bool | None = None,
        stack: TorchStack | None = None,
    ) -> None:
        """`bucketed`: pad every size of a pass to a power of two; None: only on a GPU.

        The decoder of a rank passes its own `stack`.
        """
        require_supported(config)
        super().__init__(config, weights)
        padded = weights.device.type == "cuda" if bucketed is None else bucketed
        self._stack = stack or TorchStack(config, weights, padded)

    @property
    def heads(self) -> TorchHeads:
        return TorchHeads(self.config, self.weights, self._stack.bucketed)

    def with_weights(self, config: ModelConfig, weights: DecoderWeights) -> Self:
        return type(self)(config, weights, bucketed=self._stack.bucketed)

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> Sequence[DecodeSize]:
        return ()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        """Run one pass over a batch on the CPU; move and write KV rows as it says. Do not wait for the device."""
        store, stack = self._checked_store(batch, store), self._stack
        adapters = pass_adapters(batch, self._adapters, self.device)
        requests, parts, shares = len(batch.kv_lens), num_share_parts(batch), self._new_shares(batch)
        states = self._states(batch, store)
        staged = stack.staging.stage(batch, store.page_size, store.spare_slot)
        views = stack.views(staged, store)
        batch = staged.batch
        store.move(batch.kv_copies)
        keys, values = store.arrays(DECODER_ROWS)
        token_ids, drawn = batch.token_ids, batch.drawn_before
        if drawn is not None:
            token_ids = resolve_ids(token_ids, drawn)
        stream, cos_sin, slots = stack.embed(token_ids), stack.cos_sin(batch.positions), batch.slots.long()
        hidden: dict[Tap, Tensor] = {}
        for index, spec in enumerate(self.config.layers):
            self._store_hidden(hidden, staged, index, stream)
            kind_index = self._kind_indices[index]
            kv: PagedKv | LayerStates
            if spec.recurrent is not None and store.recurrent is not None:
                kv = LayerStates(store.recurrent, kind_index, states)
            else:
                # A layer that is only an MLP reads no KV rows, but `PagedKv` needs an index that exists.
                kv_index = kind_index if spec.has_attention else 0
                window = spec.attention.window
                layer_shares = shares if window is None and spec.has_attention else None
                kv = PagedKv(keys[kv_index], values[kv_index], slots, views[window], layer_shares)
            stream = stack.layers.run(index, stream, cos_sin[index], kv, adapters.at(index))
        self._store_hidden(hidden, staged, self.config.num_layers, stream)
        final_rows = stack.final_norm(stream[batch.logit_rows])
        logits = stack.logits(final_rows)[: staged.num_logits]
        return ForwardOutput(logits, hidden, shares=None if shares is None else shares[:requests, :parts])

    def _new_shares(self, batch: ForwardBatch) -> Tensor | None:
        """Return memory for the shares of attention, with rows and parts as they are padded; None: not wanted."""
        if not batch.wants_shares:
            return None
        rounded = self._stack.staging.rounded
        parts = rounded(num_share_parts(batch))
        return torch.zeros((rounded(len(batch.token_ids)), parts), device=self.device)

    def _states(self, batch: ForwardBatch, store: TorchKvStore) -> list[RequestPass]:
        """Copy ring rows as the batch says; return what recurrent layers read and write."""
        spec = self.config.recurrent
        if spec is None or store.recurrent is None:
            return []
        store.recurrent.move(batch.ring_copies)
        return request_passes(batch, spec.kernel, self.device)

    def _store_hidden(
        self, hidden: dict[Tap, Tensor], staged: StagedBatch, layer: int, stream: Tensor
    ) -> None:
        for tap in staged.batch.taps:
            if tap.layer == layer:
                rows = stream[staged.batch.hidden_rows][: staged.num_hidden]
                hidden[tap] = self._stack.final_norm(rows) if tap.normed else rows
