"""The llama-family decoder in plain torch, on CPU and CUDA."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from foreword.backends.batch import ForwardBatch, ForwardOutput, Tap, check_taps, known_ids
from foreword.backends.interface import DecodeSize, HeadInput, KvStore
from foreword.backends.support import require_supported
from foreword.backends.torch.adapters import Additions, additions, on_device
from foreword.backends.torch.attention import GroupView, PagedKv, group_views, windowed
from foreword.backends.torch.exchange import ALONE, Exchange
from foreword.backends.torch.exits import TorchExit
from foreword.backends.torch.heads import LentEnds, TorchHead, seen_from
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.layers import TorchLayers
from foreword.backends.torch.medusa import TorchMedusa
from foreword.backends.torch.modules import TorchModule
from foreword.backends.torch.rotation import Rotations
from foreword.backends.torch.staging import StagedBatch, Staging
from foreword.backends.torch.weights import DecoderWeights, load_weights
from foreword.errors import CheckpointError
from foreword.kv.spec import DECODER_ROWS, PageSpec, RowSpec
from foreword.kv.states import as_tensor
from foreword.models.adapters import Lora
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head
from foreword.models.layer_shapes import FINAL_NORM


class TorchDecoder:
    """A decoder in plain torch: one pass over a `ForwardBatch`, KV in the paged tensors of a store."""

    backend = "torch"
    is_shape_invariant = False  # its matrix products choose another order of summation for other sizes

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        bucketed: bool | None = None,
        exchange: Exchange = ALONE,
    ) -> None:
        """`bucketed` pads every size of a pass to a power of two; by default on a GPU alone.

        With an `exchange` this is one of several ranks, and config and weights are its share.
        """
        self.config = config
        self._weights = weights
        self._bucketed = self.device.type == "cuda" if bucketed is None else bucketed
        self._staging = Staging(self.device, self._bucketed)
        self._adapters: dict[int, Lora] = {}  # by slot
        self._attention_spec = require_supported(config, self.backend).attention
        self._rotations = Rotations(config.layers, config.rope, self.device)
        self._layers = TorchLayers(config.layers, weights.layers, config.norm.eps, exchange)
        scale = torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype)
        self._embedding_scale = None if config.embedding_scale == 1 else scale.to(self.device)
        self._kv_rows = _kv_rows(config, str(weights.embedding.dtype).removeprefix("torch."))

    def set_adapter(self, slot: int, adapter: Lora | None) -> None:
        """What is added for the requests whose slot in a batch is this one; None takes it away."""
        if adapter is None:
            self._adapters.pop(slot, None)
        else:
            self._adapters[slot] = on_device(adapter, self._weights.embedding.dtype, self.device)

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    @property
    def weights(self) -> DecoderWeights:
        """The tensors, for a decoder that shares some of them."""
        return self._weights

    @property
    def weight_bytes(self) -> int:
        weights = self._weights
        head = 0 if weights.head is weights.embedding else weights.head.nbytes
        return self.layer_bytes + weights.embedding.nbytes + head + weights.final_norm.nbytes

    @property
    def layer_bytes(self) -> int:
        """Memory of the layers' weights."""
        return sum(layer.nbytes for layer in self._weights.layers)

    def with_layers(self, layers: Sequence[int]) -> "TorchDecoder":
        """A decoder that runs only these layers of this one: the same weights."""
        weights = replace(self._weights, layers=tuple(self._weights.layers[layer] for layer in layers))
        return self.remade(self.config.with_layers(layers), weights)

    def beside(self, checkpoint: Checkpoint) -> "TorchDecoder":
        """A decoder with the layers of another checkpoint, and this one's embedding, head and final norm."""
        dtype = self._weights.embedding.dtype
        weights = load_weights(checkpoint, dtype, self.device, ends=self._weights)
        return self.remade(checkpoint.config, weights)

    def followed_by(self, more: Checkpoint) -> "TorchDecoder":
        """A decoder that runs this one's layers, then those of another checkpoint and that one's final norm."""
        dtype = self._weights.embedding.dtype
        loaded = load_weights(more, dtype, self.device, ends=self._weights)
        weights = replace(
            self._weights,
            layers=(*self._weights.layers, *loaded.layers),
            final_norm=more.load(FINAL_NORM, dtype).to(self.device),
        )
        return self.remade(self.config.followed_by(more.config), weights)

    def remade(self, config: ModelConfig, weights: DecoderWeights) -> "TorchDecoder":
        """A decoder of the same kind with other layers."""
        return TorchDecoder(config, weights, bucketed=self._bucketed)

    def exit(self, more: Checkpoint, layer: int, rows: str) -> TorchExit | None:
        """The first layers on this decoder's KV rows, then the layer of another checkpoint on `rows`."""
        if self._attention_spec.latent is not None:
            return None
        lower = self.with_layers(range(layer))
        whole = lower.followed_by(more)
        return TorchExit(whole, rows, whole.layer_bytes - lower.layer_bytes)

    @torch.inference_mode()
    def exit_logits(self, wanted: HeadInput, rows: str, store: KvStore) -> Tensor:
        """A pass of a decoder whose last layer alone has `rows` of its own; see `RowsRunner.forward`."""
        if not isinstance(store, TorchKvStore):
            raise ValueError("the KV store was made for another backend")
        staged = self._staging.stage(ForwardBatch.of(wanted.arrays), store.page_size, store.spare_slot)
        batch, last = staged.batch, self.config.num_layers - 1
        dtype, slots = self._weights.embedding.dtype, batch.slots.long()
        turns = self._rotations.of(batch.positions, dtype)
        (own_keys, own_values), (keys, values) = store.arrays(rows), store.arrays(DECODER_ROWS)
        if not wanted.are_own:
            padding = len(batch.token_ids) - len(wanted.features)
            states = torch.nn.functional.pad(as_tensor(wanted.features).to(dtype), (0, 0, 0, padding))
            self._layers.keep(last, states, turns[last], PagedKv(own_keys[0], own_values[0], slots, []))
            return torch.empty((0, self.config.vocab_size), device=self.device)
        stream, views = self._embed(batch.token_ids), self._views(staged, store)
        for index, spec in enumerate(self.config.layers):
            seen = views[spec.attention.window]
            kv = PagedKv(keys[index], values[index], slots, seen)
            if index == last:
                kv = PagedKv(
                    own_keys[0], own_values[0], slots, seen_from(wanted, staged, seen, store.empty_slot)
                )
            stream = self._layers.run(index, stream, turns[index], kv, Additions())
        return self._logits(self._final_norm(stream[batch.logit_rows]))[: staged.num_logits]

    def head(self, head: Head, rows: str) -> TorchHead:
        """A draft head in the numbers of this decoder."""
        kind = TorchHead if head.spec.is_plain else TorchModule
        return kind(head, rows, LentEnds.of(self._weights), self._bucketed)

    def medusa(self, head: Head) -> TorchMedusa:
        """Medusa's heads in the numbers of this decoder."""
        return TorchMedusa(head, LentEnds.of(self._weights))

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> Sequence[DecodeSize]:
        """Nothing is captured."""
        return ()

    def kv_rows(self) -> RowSpec:
        """Keys and values of all layers, in the numbers of the weights."""
        return self._kv_rows

    def new_kv_store(self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = ()) -> TorchKvStore:
        """Memory for this decoder's rows and the `extra` ones, on its device."""
        return TorchKvStore(PageSpec.of(self.kv_rows(), extra), num_pages, page_size, self.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        """One pass over all rows of `batch` (on the CPU); KV rows are written as it says.

        Nothing in it waits for the device: the host goes on while the pass is under way.
        """
        if not isinstance(store, TorchKvStore) or store.spec.decoder != self._kv_rows:
            raise ValueError("the KV store was made for another decoder")
        check_taps(batch.taps, len(self._weights.layers))
        added = additions(batch, self._adapters, self.device)
        staged = self._staging.stage(batch, store.page_size, store.spare_slot)
        views = self._views(staged, store)
        batch = staged.batch
        store.move(batch.kv_copies)
        keys, values = store.arrays(DECODER_ROWS)
        ids = (
            batch.token_ids if batch.drawn_before is None else known_ids(batch.token_ids, batch.drawn_before)
        )
        stream = self._embed(ids)
        turns = self._rotations.of(batch.positions, stream.dtype)
        slots = batch.slots.long()
        hidden: dict[Tap, Tensor] = {}
        for index, spec in enumerate(self.config.layers):
            self._keep_hidden(hidden, staged, index, stream)
            kv = PagedKv(keys[index], values[index], slots, views[spec.attention.window])
            stream = self._layers.run(index, stream, turns[index], kv, added.at(index))
        self._keep_hidden(hidden, staged, len(self._weights.layers), stream)
        last = self._final_norm(stream[batch.logit_rows])
        return ForwardOutput(self._logits(last)[: staged.num_logits], hidden)

    def _views(self, staged: StagedBatch, store: TorchKvStore) -> dict[int | None, list[GroupView]]:
        """What the layers of every window see."""
        views = group_views(staged, store.page_size, store.empty_slot)
        windows = dict.fromkeys(layer.attention.window for layer in self.config.layers)
        return {window: windowed(views, window, store.empty_slot) for window in windows}

    def _embed(self, token_ids: Tensor) -> Tensor:
        stream = embedding(token_ids, self._weights.embedding)  # [rows, hidden]
        return stream if self._embedding_scale is None else stream * self._embedding_scale

    def _logits(self, last: Tensor) -> Tensor:
        logits = linear(last, self._weights.head).float()
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _keep_hidden(
        self, hidden: dict[Tap, Tensor], staged: StagedBatch, layer: int, stream: Tensor
    ) -> None:
        for tap in staged.batch.taps:
            if tap.layer == layer:
                rows = stream[staged.batch.hidden_rows][: staged.num_hidden]
                hidden[tap] = self._final_norm(rows) if tap.normed else rows

    def _final_norm(self, rows: Tensor) -> Tensor:
        return self._layers.norm(rows, self._weights.final_norm)


def _kv_rows(config: ModelConfig, dtype: str) -> RowSpec:
    """Keys and values of all layers; of latent attention, one row for both."""
    shapes = {layer.attention.kept for layer in config.layers}
    if len(shapes) != 1:
        raise CheckpointError(f"the layers of this {config.architecture} model keep rows of different sizes")
    heads, dim, values = shapes.pop()
    return RowSpec(DECODER_ROWS, config.num_layers, heads, dim, values, config.widest_window, dtype)
