"""What every decoder offers, whatever runs it."""

from collections.abc import Sequence
from typing import Protocol

import torch

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.models.config import ModelConfig


class Decoder(Protocol):
    """A loaded model that owns its KV memory."""

    config: ModelConfig

    @property
    def device(self) -> torch.device:
        """Where the weights and the KV are."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        ...

    @property
    def layer_bytes(self) -> int:
        """Memory of the layers' weights: all but the embedding, the output head and the last norm."""
        ...

    def with_layers(self, layers: Sequence[int]) -> "Decoder":
        """A decoder that runs only these layers of this one: the same weights, KV memory of its own."""
        ...

    def kv_bytes_per_row(self) -> int:
        """Memory that one token's keys and values take in all layers."""
        ...

    def allocate_kv(self, num_pages: int, page_size: int) -> None:
        """Make room for `num_pages` pages of KV; what was there is gone."""
        ...

    def verify(self, batch: ForwardBatch) -> ForwardOutput:
        """One pass over all rows of `batch` (on the CPU); KV rows are moved and written as it says."""
        ...
