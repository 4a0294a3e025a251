"""One rank's decoder: its share of every layer, and its exchanges with the other ranks."""

from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from foreword.backends.batch import BatchSizes, ForwardBatch, ForwardOutput
from foreword.backends.interface import KvStore
from foreword.backends.parallel.exchange import PlannedExchange, RankExchange
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
        """`config` describes the rank's share, `vocab_size` is that of the undivided model."""
        super().__init__(config, weights, bucketed, exchange)
        self.exchange = exchange
        self.vocab_size = vocab_size
        self._first_token = exchange.rank * config.vocab_size

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Embed token ids: each rank embeds the ids in its share, and the sum over ranks has all of them."""
        local_ids = token_ids - self._first_token
        is_local = (local_ids >= 0) & (local_ids < self.config.vocab_size)
        embedded = embedding(local_ids.clamp(0, self.config.vocab_size - 1), self.weights.embedding)
        return self.exchange.total(embedded.masked_fill(~is_local.unsqueeze(1), 0))

    def logits(self, final_rows: Tensor) -> Tensor:
        return self.exchange.gather_columns(super().logits(final_rows))[:, : self.vocab_size]


class RankDecoder(TorchDecoder):
    """A torch decoder with a share of a model's heads and widths; sums over ranks give the undivided model's results.

    All ranks run the same passes in the same order. Only the first rank gets the logits; all get the hidden states.
    """

    def __init__(self, stack: RankStack) -> None:
        super().__init__(stack.config, stack.weights, stack=stack)
        self._rank_stack = stack
        self._exchange = stack.exchange

    def with_weights(self, config: ModelConfig, weights: DecoderWeights) -> Self:
        rank_stack = self._rank_stack
        return type(self)(
            RankStack(config, weights, rank_stack.exchange, rank_stack.vocab_size, rank_stack.bucketed)
        )

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        """Run this rank's part of a pass. If it fails, complete its exchanges, so that the other ranks can finish."""
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

    def _planned(self, sizes: BatchSizes) -> list[PlannedExchange]:
        """Return all exchanges of a pass, in order."""
        rounded = self._stack.staging.rounded
        rows = rounded(sizes.rows)
        stream = PlannedExchange((rows, self.config.hidden_size), self.weights.dtype)
        planned = [stream]  # the embedding
        for layer in self.config.layers:
            if layer.has_attention and layer.attention.qk_norm and layer.attention.wide_qk_norm:
                planned += [PlannedExchange((rows, 1), torch.float32)] * 2  # queries and keys
            if layer.recurrent is not None and layer.recurrent.shared_norm:
                planned.append(PlannedExchange((rows, 1), torch.float32))
            planned += [stream] * (layer.mixes + layer.has_mlp)  # the outputs of the sublayers
        if num_logits := rounded(sizes.logit_rows):
            planned.append(
                PlannedExchange((num_logits, self.config.vocab_size), torch.float32, is_gathered_once=True)
            )
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
