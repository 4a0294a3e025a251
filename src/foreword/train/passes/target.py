"""Runs the frozen target over whole texts, and returns its hidden states for training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from foreword.backends.support import require_trainable
from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.weights import DecoderWeights, load_weights
from foreword.models.config import AttentionSpec, ModelConfig, RopeSpec
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.rope import frequencies
from foreword.train.passes.attention import Spans, causal_attention
from foreword.train.passes.layers import Sizes, after_attention, before_attention, rotation_of
from foreword.train.passes.packing import PackedBatch

KeepKv = Callable[[int, Tensor, Tensor], None]
"""A function that receives a layer index, and the layer's keys and values."""


@dataclass(frozen=True)
class Features:
    """Hidden states of a target pass, which a learner reads."""

    taps: tuple[Tensor, ...]  # residual stream at each tap, [rows, hidden]
    last: Tensor  # residual stream after the final norm


class FrozenTarget:
    """A decoder whose weights are not trained."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, *, compiled: bool = False) -> None:
        self.config = config
        self.weights = weights
        self.attention: AttentionSpec = require_trainable(config).attention
        self._frequencies = frequencies(config.rope, config.layer.attention.head_dim).to(
            weights.embedding.device
        )
        plain = RopeSpec(config.rope.theta)
        self._plain_frequencies = frequencies(plain, self.attention.head_dim).to(weights.embedding.device)
        self._layers = [layer.plain for layer in weights.layers]
        self._before = torch.compile(before_attention) if compiled else before_attention
        self._after = torch.compile(after_attention) if compiled else after_attention

    @staticmethod
    def load(
        checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, *, compiled: bool
    ) -> "FrozenTarget":
        return FrozenTarget(checkpoint.config, load_weights(checkpoint, dtype, device), compiled=compiled)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def sizes(self) -> Sizes:
        """Heads, KV heads, head size."""
        return self.attention.num_heads, self.attention.num_kv_heads, self.attention.head_dim

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [rows, dim / 2] for these positions."""
        return rotation_of(positions, self._frequencies, self.dtype)

    def head_rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for a head's attention. A head's config has no frequency scaling."""
        return rotation_of(positions, self._plain_frequencies, self.dtype)

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
        """Return the hidden states of a batch at these taps."""
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


class KeptFeatures:
    """Caches the target's hidden states by batch, for later epochs."""

    def __init__(self, target: FrozenTarget, taps: Sequence[int], room: int) -> None:
        """Create an empty cache of at most `room` bytes on the target's device."""
        self._target, self._taps, self._room = target, taps, room
        self._kept: dict[int, Features] = {}

    def of(self, number: int, batch: PackedBatch) -> Features:
        """Return the hidden states of a batch, which has the same number in every epoch."""
        if (kept := self._kept.get(number)) is not None:
            return kept
        features = self._target.features(batch, self._taps)
        size = sum(tensor.nbytes for tensor in (*features.taps, features.last))
        if size <= self._room:
            self._room -= size
            self._kept[number] = features
        return features


def wide_logits(rows: Tensor, head: Tensor) -> Tensor:
    """Return logits in float32; in bfloat16 more logits are equal, and breaking a tie differently changes the text."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows, head.t(), out_dtype=torch.float32)
    return linear(rows.float(), head.float())
