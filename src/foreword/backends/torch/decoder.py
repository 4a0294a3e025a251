"""The llama-family decoder in plain torch, on CPU and CUDA."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from foreword.backends.batch import ForwardBatch, ForwardOutput, Tap, check_taps, known_ids
from foreword.backends.interface import KvStore
from foreword.backends.support import require_supported
from foreword.backends.torch.attention import GroupView, group_views, paged_attention
from foreword.backends.torch.heads import LentEnds, TorchHead
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.medusa import TorchMedusa
from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.staging import StagedBatch, Staging
from foreword.backends.torch.weights import DecoderWeights, LayerWeights, load_weights
from foreword.backends.weight_loader import FINAL_NORM
from foreword.kv.spec import DECODER_ROWS, PageSpec, RowSpec
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head
from foreword.models.rope import inverse_frequencies, rotate


@dataclass(frozen=True)
class PagedKv:
    """The KV of one layer during a pass."""

    keys: Tensor  # [physical rows, kv heads, dim]
    values: Tensor
    slots: Tensor  # int64 [rows], where the pass writes
    views: list[GroupView]  # what it reads


class TorchDecoder:
    """A decoder in plain torch: one pass over a `ForwardBatch`, KV in the paged tensors of a store."""

    is_shape_invariant = False  # its matrix products choose another order of summation for other sizes

    def __init__(self, config: ModelConfig, weights: DecoderWeights, *, bucketed: bool | None = None) -> None:
        """`bucketed` pads every size of a pass to a power of two; by default on a GPU alone."""
        self.config = config
        self._weights = weights
        self._inverse_frequencies = inverse_frequencies(config).to(weights.embedding.device)
        self._bucketed = self.device.type == "cuda" if bucketed is None else bucketed
        self._staging = Staging(self.device, self._bucketed)
        dtype = str(weights.embedding.dtype).removeprefix("torch.")
        self._attention_spec = spec = require_supported(config, "torch").attention
        self._kv_rows = RowSpec(
            DECODER_ROWS, config.num_layers, spec.num_kv_heads, spec.head_dim, dtype=dtype
        )

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
        tensors = [tensor for layer in self._weights.layers for tensor in vars(layer).values()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

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

    def head(self, head: Head, rows: str) -> TorchHead:
        """A draft head in the numbers of this decoder."""
        return TorchHead(head, rows, LentEnds.of(self._weights), self._bucketed)

    def medusa(self, head: Head) -> TorchMedusa:
        """Medusa's heads in the numbers of this decoder."""
        return TorchMedusa(head, LentEnds.of(self._weights))

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
        staged = self._staging.stage(batch, store.page_size, store.spare_slot)
        views = group_views(staged, store.page_size, store.empty_slot)
        batch = staged.batch
        store.move(batch.kv_copies)
        keys, values = store.arrays(DECODER_ROWS)
        angles = batch.positions.unsqueeze(1).float() * self._inverse_frequencies  # [rows, head_dim / 2]
        ids = (
            batch.token_ids if batch.drawn_before is None else known_ids(batch.token_ids, batch.drawn_before)
        )
        stream = embedding(ids, self._weights.embedding)  # [rows, hidden]
        cos_sin = angles.cos().to(stream.dtype), angles.sin().to(stream.dtype)
        slots = batch.slots.long()
        hidden: dict[Tap, Tensor] = {}
        for index, layer in enumerate(self._weights.layers):
            self._keep_hidden(hidden, staged, index, stream)
            kv = PagedKv(keys[index], values[index], slots, views)
            stream = stream + self._attention(layer, stream, cos_sin, kv)
            stream = stream + self._mlp(layer, stream)
        self._keep_hidden(hidden, staged, len(self._weights.layers), stream)
        last = self._final_norm(stream[batch.logit_rows])
        return ForwardOutput(linear(last, self._weights.head).float()[: staged.num_logits], hidden)

    def _keep_hidden(
        self, hidden: dict[Tap, Tensor], staged: StagedBatch, layer: int, stream: Tensor
    ) -> None:
        for tap in staged.batch.taps:
            if tap.layer == layer:
                rows = stream[staged.batch.hidden_rows][: staged.num_hidden]
                hidden[tap] = self._final_norm(rows) if tap.normed else rows

    def _final_norm(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self._weights.final_norm, self.config.norm.eps)

    def _attention(
        self, layer: LayerWeights, stream: Tensor, cos_sin: tuple[Tensor, Tensor], kv: PagedKv
    ) -> Tensor:
        spec, eps = self._attention_spec, self.config.norm.eps
        normed = rms_norm(stream, layer.input_norm, eps)
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        heads = qkv.view(len(stream), -1, spec.head_dim)  # [rows, heads + 2 * kv heads, dim]
        q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q = rms_norm(q, layer.query_norm, eps)
            k = rms_norm(k, layer.key_norm, eps)
        kv.keys[kv.slots] = rotate(k, *cos_sin)
        kv.values[kv.slots] = v
        attended = paged_attention(rotate(q, *cos_sin), kv.keys, kv.values, kv.views)
        return linear(attended.reshape(len(stream), -1), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, stream: Tensor) -> Tensor:
        normed = rms_norm(stream, layer.mlp_norm, self.config.norm.eps)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(silu(gate) * up, layer.down, layer.down_bias)
