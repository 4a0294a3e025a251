"""Common part of decoders on torch tensors: description and derived decoders."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Self

import torch
from torch import Tensor

from foreword.backends.torch.sources import M_co
from foreword.backends.torch.weights import DecoderWeights
from foreword.errors import CheckpointError
from foreword.kv.spec import DECODER_ROWS, RowSpec
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint


class DescribedDecoder(ABC, Generic[M_co]):
    """A decoder's config, weights and KV rows, without its passes."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights[M_co]) -> None:
        self.config = config
        self.weights = weights  # for decoders that share some of them
        self.weight_bytes, self.layer_bytes = weights.nbytes, weights.layer_bytes
        self._kv_rows = _kv_rows(config, weights.dtype)

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


def _kv_rows(config: ModelConfig, dtype: torch.dtype) -> RowSpec:
    """Return keys and values of all layers; with latent attention, one row for both."""
    attending = [layer.attention for layer in config.layers if layer.has_attention]
    shapes = {attention.kept for attention in attending}
    if not shapes:
        raise CheckpointError(
            f"no layer of this {config.architecture} model has attention; use another model"
        )
    if len(shapes) != 1:
        raise CheckpointError(f"the layers of this {config.architecture} model keep rows of different sizes")
    heads, dim, values = shapes.pop()
    numbers = str(dtype).removeprefix("torch.")
    return RowSpec(DECODER_ROWS, len(attending), heads, dim, values, config.widest_window, numbers)
