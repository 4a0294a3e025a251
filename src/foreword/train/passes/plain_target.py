"""Runs a target with Llama's layers over whole texts, without a paged KV cache."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from foreword.backends.support import require_plain
from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.weights import DecoderWeights, load_weights
from foreword.models.config import AttentionSpec, ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.rope import frequencies
from foreword.train.passes.attention import Spans, causal_attention
from foreword.train.passes.layers import after_attention, before_attention, rotation_of
from foreword.train.passes.packing import PackedBatch
from foreword.train.passes.target import Features, FrozenTarget

KeepKv = Callable[[int, Tensor, Tensor], None]
"""A function that receives a layer index, and the layer's keys and values."""


class PlainTarget(FrozenTarget):
    """A target with Llama's layers. Its layers can also be run one by one, to write texts, and copied."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, *, compiled: bool = False) -> None:
        super().__init__(config, weights)
        self.attention: AttentionSpec = require_plain(config).attention
        self._frequencies = frequencies(config.rope, self.attention.head_dim).to(self.device)
        self._layers = [layer.plain for layer in weights.layers]
        self._before = torch.compile(before_attention) if compiled else before_attention
        self._after = torch.compile(after_attention) if compiled else after_attention

    @staticmethod
    def load(
        checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, *, compiled: bool = False
    ) -> "PlainTarget":
        return PlainTarget(checkpoint.config, load_weights(checkpoint, dtype, device), compiled=compiled)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [rows, dim / 2] for these positions."""
        return rotation_of(positions, self._frequencies, self.dtype)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        spans: Spans,
        taps: Sequence[int] = (),
        keep_kv: KeepKv | None = None,
    ) -> Features:
        """Run one pass over whole texts; return its hidden states. `keep_kv` receives keys and values."""
        rotation = self.rotation(positions)
        stream = embedding(token_ids, self.weights.embedding)
        tapped = {0: stream}
        for index in range(self.config.num_layers):
            q, k, v = self.before(index, stream, *rotation)
            if keep_kv is not None:
                keep_kv(index, k, v)
            stream = self.after(index, stream, causal_attention(q, k, v, spans, spans))
            if index + 1 in taps:
                tapped[index + 1] = stream
        return Features(tuple(tapped[tap] for tap in taps), self.final_norm(stream))

    def features(self, batch: PackedBatch, taps: Sequence[int]) -> Features:
        return self.forward(batch.token_ids, batch.positions, batch.texts, taps)

    def before(self, index: int, stream: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries and keys of one layer, both rotated, and its values: [rows, heads, dim]."""
        for tensor in (stream, cos, sin):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._before(stream, cos, sin, self._layers[index], self.sizes, self.config.norm.eps)

    def after(self, index: int, stream: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after the layer; `attended` is the output of its attention."""
        for tensor in (stream, attended):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._after(stream, attended, self._layers[index], self.config.norm.eps)

    def final_norm(self, stream: Tensor) -> Tensor:
        return rms_norm(stream, self.weights.final_norm, self.config.norm.eps)
