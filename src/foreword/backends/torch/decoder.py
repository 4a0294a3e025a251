"""The llama-family decoder in plain torch, on CPU and CUDA."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.torch.attention import GroupView, group_views, paged_attention
from foreword.backends.torch.staging import Staging
from foreword.backends.torch.weights import DecoderWeights, LayerWeights
from foreword.models.config import ModelConfig
from foreword.models.rope import inverse_frequencies, rotate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale every row to unit root-mean-square, then by `weight`; the mean is taken in float32."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


class TorchDecoder:
    """A target in plain torch: one pass over a `ForwardBatch`, KV in paged tensors that it owns.

    Behind the pages its KV memory has two more rows: one that padding writes to, and one of zeros that stands
    for rows which a request does not have.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, *, bucketed: bool | None = None) -> None:
        """`bucketed` pads every size of a pass to a power of two; by default on a GPU alone."""
        self.config = config
        self._weights = weights
        self._inverse_frequencies = inverse_frequencies(config).to(weights.embedding.device)
        self._bucketed = self.device.type == "cuda" if bucketed is None else bucketed
        self._staging = Staging(self.device, self._bucketed)
        self._page_size = 0
        self._paged_rows = 0
        self._keys = self._values = torch.empty(0)

    @property
    def device(self) -> torch.device:
        """Where the weights and the KV are."""
        return self._weights.embedding.device

    @property
    def weights(self) -> DecoderWeights:
        """The tensors, for a decoder that shares some of them."""
        return self._weights

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        weights = self._weights
        head = 0 if weights.head is weights.embedding else weights.head.nbytes
        return self.layer_bytes + weights.embedding.nbytes + head + weights.final_norm.nbytes

    @property
    def layer_bytes(self) -> int:
        """Memory of the layers' weights."""
        tensors = [tensor for layer in self._weights.layers for tensor in vars(layer).values()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def with_layers(self, layers: Sequence[int]) -> "TorchDecoder":
        """A decoder that runs only these layers of this one: the same weights, KV memory of its own."""
        weights = replace(self._weights, layers=tuple(self._weights.layers[layer] for layer in layers))
        config = replace(self.config, num_layers=len(layers))
        return TorchDecoder(config, weights, bucketed=self._bucketed)

    def kv_bytes_per_row(self) -> int:
        """Memory that one token's keys and values take in all layers."""
        return 2 * self.config.num_layers * self.config.kv_width * self._weights.embedding.element_size()

    def allocate_kv(self, num_pages: int, page_size: int) -> None:
        """Make room for `num_pages` pages of KV; what was there is gone."""
        self._page_size, self._paged_rows = page_size, num_pages * page_size
        config = self.config
        shape = (config.num_layers, self._paged_rows + 2, config.num_kv_heads, config.head_dim)
        self._keys = torch.empty(shape, dtype=self._weights.embedding.dtype, device=self.device)
        self._values = torch.empty_like(self._keys)
        self._keys[:, self._paged_rows :] = 0
        self._values[:, self._paged_rows :] = 0

    @torch.inference_mode()
    def verify(self, batch: ForwardBatch) -> ForwardOutput:
        """One pass over all rows of `batch` (on the CPU); KV rows are written as it says.

        Nothing in it waits for the device: the host goes on while the pass is under way.
        """
        staged = self._staging.stage(batch, self._page_size, spare_slot=self._paged_rows)
        views = group_views(staged, self._page_size, empty_slot=self._paged_rows + 1)
        batch = staged.batch
        self._move_rows(batch.kv_copies.long())
        angles = batch.positions.unsqueeze(1).float() * self._inverse_frequencies  # [rows, head_dim / 2]
        stream = embedding(batch.token_ids, self._weights.embedding)  # [rows, hidden]
        cos_sin = angles.cos().to(stream.dtype), angles.sin().to(stream.dtype)
        slots = batch.slots.long()
        hidden = {}
        for index, layer in enumerate(self._weights.layers):
            if index in batch.hidden_layers:
                hidden[index] = stream[batch.hidden_rows][: staged.num_hidden]
            stream = stream + self._attention(index, layer, stream, cos_sin, slots, views)
            stream = stream + self._mlp(layer, stream)
        if len(self._weights.layers) in batch.hidden_layers:
            hidden[len(self._weights.layers)] = stream[batch.hidden_rows][: staged.num_hidden]
        last = rms_norm(stream[batch.logit_rows], self._weights.final_norm, self.config.rms_norm_eps)
        return ForwardOutput(linear(last, self._weights.head).float()[: staged.num_logits], hidden)

    def _move_rows(self, copies: Tensor) -> None:
        if len(copies):
            source, target = copies.unbind(1)
            self._keys[:, target] = self._keys[:, source]
            self._values[:, target] = self._values[:, source]

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        stream: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        slots: Tensor,
        views: list[GroupView],
    ) -> Tensor:
        config = self.config
        normed = rms_norm(stream, layer.input_norm, config.rms_norm_eps)
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        heads = qkv.view(len(stream), -1, config.head_dim)  # [rows, heads + 2 * kv heads, dim]
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q = rms_norm(q, layer.query_norm, config.rms_norm_eps)
            k = rms_norm(k, layer.key_norm, config.rms_norm_eps)
        self._keys[index, slots] = rotate(k, *cos_sin)
        self._values[index, slots] = v
        attended = paged_attention(rotate(q, *cos_sin), self._keys[index], self._values[index], views)
        return linear(attended.reshape(len(stream), -1), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, stream: Tensor) -> Tensor:
        normed = rms_norm(stream, layer.mlp_norm, self.config.rms_norm_eps)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(silu(gate) * up, layer.down, layer.down_bias)
