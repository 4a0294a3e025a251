"""One rank's decoder: its share of every layer, and its exchanges."""

from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from foreword.backends.batch import BatchSizes, ForwardBatch, ForwardOutput
from foreword.backends.interface import KvStore
from foreword.backends.parallel.exchange import Planned, RankExchange
from foreword.backends.parallel.shards import Shard, ShardCheckpoint
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.stack import TorchStack
from foreword.backends.torch.weights import DecoderWeights, load_weights
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import ModelFile
from foreword.progress import Progress


class RankStack(TorchStack):
    """A rank's share of the layers and of the vocabulary."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        exchange: RankExchange,
        vocab_size: int,
        bucketed: bool,
    ) -> None:
        """`config` is the share's, `vocab_size` the whole model's."""
        super().__init__(config, weights, bucketed, exchange)
        self.exchange = exchange
        self.vocab_size = vocab_size
        self._first_token = exchange.rank * config.vocab_size

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Embed the rank's own tokens; others are zero, to be summed over ranks."""
        own = token_ids - self._first_token
        is_own = (own >= 0) & (own < self.config.vocab_size)
        known = embedding(own.clamp(0, self.config.vocab_size - 1), self.weights.embedding)
        return self.exchange.total(known.masked_fill(~is_own.unsqueeze(1), 0))

    def logits(self, last: Tensor) -> Tensor:
        return self.exchange.joined(super().logits(last))[:, : self.vocab_size]


class RankDecoder(TorchDecoder):
    """A torch decoder of a narrower model, whose sums over ranks give the whole model.

    All ranks run the same passes in the same order. The first one gets the logits; hidden states are equal on all.
    """

    def __init__(self, stack: RankStack) -> None:
        super().__init__(stack.config, stack.weights, stack=stack)
        self._share = stack
        self._exchange = stack.exchange

    def with_weights(self, config: ModelConfig, weights: DecoderWeights) -> Self:
        share = self._share
        return type(self)(RankStack(config, weights, share.exchange, share.vocab_size, share.bucketed))

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        """Run this rank's part of a pass. If it fails, the other ranks can still finish."""
        self._exchange.begin()
        try:
            return super().forward(batch, store)
        except BaseException:
            self._exchange.finish(self._planned(batch.arrays.sizes), self.device)
            raise

    def skip_pass(self, sizes: BatchSizes) -> None:
        """Skip a pass that cannot start here, so that the other ranks can finish it."""
        self._exchange.begin()
        self._exchange.finish(self._planned(sizes), self.device)

    def _planned(self, sizes: BatchSizes) -> list[Planned]:
        rounded = self._stack.staging.rounded
        rows = rounded(sizes.rows)
        stream = Planned((rows, self.config.hidden_size), self.weights.dtype)
        planned = [stream]
        for layer in self.config.layers:
            if layer.attention.qk_norm and layer.attention.wide_qk_norm:
                planned += [Planned((rows, 1), torch.float32)] * 2  # queries and keys
            planned += [stream, stream]  # attention and MLP
        if wanted := rounded(sizes.logit_rows):
            planned.append(Planned((wanted, self.config.vocab_size), torch.float32, is_joined=True))
        return planned


def load_rank(
    checkpoint: ModelFile,
    exchange: RankExchange,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> RankDecoder:
    share = ShardCheckpoint(checkpoint, Shard(exchange.rank, exchange.size))
    weights = load_weights(share, dtype, device, progress)
    bucketed = device.type == "cuda"
    return RankDecoder(RankStack(share.config, weights, exchange, checkpoint.config.vocab_size, bucketed))
