"""The frozen target of a training: its matrices, and its hidden states along whole texts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from foreword.backends.torch.weights import DecoderWeights
from foreword.models.config import ModelConfig, RopeSpec
from foreword.models.heads.writing import head_sizes
from foreword.models.rope import frequencies
from foreword.train.passes.layers import Sizes, rotation_of
from foreword.train.passes.packing import PackedBatch


@dataclass(frozen=True)
class Features:
    """Hidden states of a target pass, which a learner reads."""

    taps: tuple[Tensor, ...]  # residual stream at each tap, [rows, hidden]
    last: Tensor  # residual stream after the final norm, [rows, hidden]


class FrozenTarget(ABC):
    """A decoder whose weights are not trained."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        heads, kv_heads, head_dim, _ = head_sizes(config)
        self.sizes: Sizes = heads, kv_heads, head_dim  # attention sizes of draft heads for this target
        self._head_frequencies = frequencies(RopeSpec(config.rope.theta), head_dim).to(self.device)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def head_rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for a head's attention. A head's config has no frequency scaling."""
        return rotation_of(positions, self._head_frequencies, self.dtype)

    @abstractmethod
    def features(self, batch: PackedBatch, taps: Sequence[int]) -> Features:
        """Return the hidden states of a batch at these taps."""

    def logits(self, last: Tensor, matrix: Tensor) -> Tensor:
        """Return the target's float32 logits; `last` are states after the final norm, `matrix` output rows."""
        logits, cap = wide_logits(last, matrix), self.config.logit_softcap
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        return logits if cap is None else cap * torch.tanh(logits / cap)


class CachedFeatures:
    """Caches the target's hidden states by batch, for later epochs."""

    def __init__(self, target: FrozenTarget, taps: Sequence[int], room: int) -> None:
        """Create an empty cache of at most `room` bytes on the target's device."""
        self._target, self._taps, self._room = target, taps, room
        self._cached: dict[int, Features] = {}  # by batch number

    def of(self, number: int, batch: PackedBatch) -> Features:
        """Return the hidden states of a batch, which has the same number in every epoch."""
        if (cached := self._cached.get(number)) is not None:
            return cached
        features = self._target.features(batch, self._taps)
        size = sum(tensor.nbytes for tensor in (*features.taps, features.last))
        if size <= self._room:
            self._room -= size
            self._cached[number] = features
        return features


def wide_logits(rows: Tensor, head: Tensor) -> Tensor:
    """Return logits in float32; in bfloat16 more logits are equal, and breaking a tie differently changes the text."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows, head.t(), out_dtype=torch.float32)
    return linear(rows.float(), head.float())
