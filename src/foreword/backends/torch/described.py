"""Common part of decoders on torch tensors: description and derived decoders."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Self

import torch
from torch import Tensor

from foreword.backends.states import kv_rows
from foreword.backends.torch.sources import M_co
from foreword.backends.torch.weights import DecoderWeights
from foreword.kv.spec import RowSpec
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint


class DescribedDecoder(ABC, Generic[M_co]):
    """A decoder's config, weights and KV rows, without its passes."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights[M_co]) -> None:
        self.config = config
        self.weights = weights  # for decoders that share some of them
        self.weight_bytes, self.layer_bytes = weights.nbytes, weights.layer_bytes
        self._kv_rows = kv_rows(config, str(weights.dtype).removeprefix("torch."))

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def with_layers(self, layers: Sequence[int]) -> Self:
        """Return a decoder that runs only these layers, with shared weights."""
        return self.remade(self.config.with_layers(layers), self.weights.with_layers(layers))

    def beside(self, checkpoint: Checkpoint) -> Self:
        """Return a decoder with another checkpoint's layers, and this one's embedding, head and final norm."""
        return self.remade(checkpoint.config, self.weights.beside(checkpoint))

    def followed_by(self, more: Checkpoint) -> Self:
        """Return a decoder with this one's layers, then another checkpoint's layers and final norm."""
        return self.remade(self.config.followed_by(more.config), self.weights.followed_by(more))

    @abstractmethod
    def remade(self, config: ModelConfig, weights: DecoderWeights[M_co | Tensor]) -> Self:
        """Return a decoder of the same kind with other layers."""

    def kv_rows(self) -> RowSpec:
        """Return keys and values of all layers with attention, in the weights' dtype."""
        return self._kv_rows
