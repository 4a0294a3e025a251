"""Everything that a torch decoder computes with: embedding, layers and output matrix."""

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from foreword.backends.torch.attention import GroupView, group_views, windowed
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.layers import TorchLayers
from foreword.backends.torch.norms import SINGLE_RANK, Exchange
from foreword.backends.torch.staging import StagedBatch, Staging
from foreword.backends.torch.weights import DecoderWeights
from foreword.models.config import ModelConfig
from foreword.models.rope import CosSin, Rotations


class TorchStack:
    """A decoder's layers with embedding and output matrix."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, bucketed: bool, exchange: Exchange = SINGLE_RANK
    ) -> None:
        """With an `exchange`, config and weights are the share of one of several ranks."""
        self.config = config
        self.weights = weights
        self.bucketed = bucketed
        self.staging = Staging(weights.device, bucketed)
        self.layers = TorchLayers(config.layers, weights.layers, config.norm.eps, exchange)
        self._rotations = Rotations(config.layers, config.rope, weights.device)
        scale = torch.tensor(config.embedding_scale, dtype=weights.dtype)
        self._embedding_scale = None if config.embedding_scale == 1 else scale.to(weights.device)

    def cos_sin(self, positions: Tensor) -> list[CosSin | None]:
        """Return cosines and sines of every layer; None for layers without rotary embedding."""
        return self._rotations.of(positions, self.weights.dtype)

    def views(self, staged: StagedBatch, store: TorchKvStore) -> dict[int | None, list[GroupView]]:
        """Return the visible KV rows by sliding window; None: without a window."""
        views = group_views(staged, store.page_size, store.empty_slot)
        windows = dict.fromkeys(layer.attention.window for layer in self.config.layers)
        return {window: windowed(views, window, store.empty_slot) for window in windows}

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the residual stream before the first layer."""
        stream = self._embedded(token_ids)
        return stream if self._embedding_scale is None else stream * self._embedding_scale

    def _embedded(self, token_ids: Tensor) -> Tensor:
        return embedding(token_ids, self.weights.embedding)

    def final_norm(self, rows: Tensor) -> Tensor:
        return self.layers.norm(rows, self.weights.final_norm)

    def logits(self, final_rows: Tensor) -> Tensor:
        """Return float32 logits of rows after the final norm."""
        logits = linear(final_rows, self.weights.head).float()
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
