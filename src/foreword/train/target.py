"""The target as the trainer runs it: whole texts at once, every layer's parts compiled once for all layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from foreword.backends.support import require_supported
from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.weights import DecoderWeights, load_weights
from foreword.models.config import AttentionSpec, ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.rope import inverse_frequencies, rotate
from foreword.train.attention import Spans, causal_attention

KeepKv = Callable[[int, Tensor, Tensor], None]
"""Hears of a layer's keys and values."""
_Tensors = tuple[Tensor | None, ...]  # a LayerWeights' values in their order


@dataclass(frozen=True)
class Features:
    """What a head reads of a target pass."""

    taps: tuple[Tensor, ...]  # residual streams at the boundaries that were asked for, [rows, hidden]
    last: Tensor  # the stream after all layers, after the final norm


class Target:
    """A frozen decoder with the weights of a checkpoint."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, *, compiled: bool = False) -> None:
        self.config = config
        self.weights = weights
        self.attention: AttentionSpec = require_supported(config, "torch").attention
        self._frequencies = inverse_frequencies(config).to(weights.embedding.device)
        self._layers = [tuple(vars(layer).values()) for layer in weights.layers]
        self._before = torch.compile(_before_attention) if compiled else _before_attention
        self._after = torch.compile(_after_attention) if compiled else _after_attention

    @staticmethod
    def load(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, *, compiled: bool) -> "Target":
        return Target(checkpoint.config, load_weights(checkpoint, dtype, device), compiled=compiled)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows, dim / 2] for these positions."""
        angles = positions.unsqueeze(1).float() * self._frequencies
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        spans: Spans,
        taps: Sequence[int] = (),
        keep_kv: KeepKv | None = None,
    ) -> Features:
        """One pass over whole texts."""
        rotation = self.rotation(positions)
        stream = embedding(token_ids, self.weights.embedding)
        kept = {0: stream}
        for index in range(self.config.num_layers):
            q, k, v = self.before(index, stream, *rotation)
            if keep_kv is not None:
                keep_kv(index, k, v)
            stream = self.after(index, stream, causal_attention(q, k, v, spans, spans))
            if index + 1 in taps:
                kept[index + 1] = stream
        return Features(tuple(kept[tap] for tap in taps), self.final_norm(stream))

    def before(self, index: int, stream: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values of one layer: [rows, heads, dim]."""
        spec = self.attention
        for tensor in (stream, cos, sin):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return self._before(stream, cos, sin, self._layers[index], sizes, self.config.norm.eps)

    def after(self, index: int, stream: Tensor, attended: Tensor) -> Tensor:
        """The stream after the layer."""
        for tensor in (stream, attended):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._after(stream, attended, self._layers[index], self.config.norm.eps)

    def final_norm(self, stream: Tensor) -> Tensor:
        return rms_norm(stream, self.weights.final_norm, self.config.norm.eps)


def _before_attention(
    stream: Tensor, cos: Tensor, sin: Tensor, tensors: _Tensors, sizes: tuple[int, int, int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    # A tuple and not the class, so that one compiled form fits all layers.
    input_norm, qkv, qkv_bias, query_norm, key_norm = tensors[:5]
    heads, kv_heads, dim = sizes
    joined = linear(rms_norm(stream, _there(input_norm), eps), _there(qkv), qkv_bias)
    q, k, v = torch.split(joined.view(stream.shape[0], -1, dim), [heads, kv_heads, kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        q = rms_norm(q, query_norm, eps)
        k = rms_norm(k, key_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def _after_attention(stream: Tensor, attended: Tensor, tensors: _Tensors, eps: float) -> Tensor:
    output, output_bias, mlp_norm, gate_up, gate_up_bias, down, down_bias = tensors[5:]
    stream = stream + linear(attended.flatten(1), _there(output), output_bias)
    normed = rms_norm(stream, _there(mlp_norm), eps)
    gate, up = linear(normed, _there(gate_up), gate_up_bias).chunk(2, dim=-1)
    return stream + linear(silu(gate) * up, _there(down), down_bias)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def wide_logits(rows: Tensor, head: Tensor) -> Tensor:
    """Logits in float32: bf16 ones tie, and a tie broken wrongly is another text."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows, head.t(), out_dtype=torch.float32)
    return linear(rows.float(), head.float())
