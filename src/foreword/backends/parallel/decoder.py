"""A decoder on several ranks (tensor parallelism). The first rank is in this process, and gets the logits."""

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from foreword.backends.batch import ForwardBatch, ForwardOutput, check_taps
from foreword.backends.interface import DecodeSize, KvStore
from foreword.backends.parallel.messages import (
    Forward,
    LoadShard,
    MakeStore,
    MoveRows,
    SetRankAdapter,
    TakeLayers,
    packed_adapter,
    packed_batch,
    packed_moves,
)
from foreword.backends.parallel.rank import RankDecoder, load_rank
from foreword.backends.parallel.shards import Shard, adapter_share
from foreword.backends.parallel.workers import RankFault, Workers
from foreword.backends.torch.head_factory import TorchHeads
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.weights import load_outer_matrices
from foreword.backends.weight_loader import WeightLoader
from foreword.errors import CheckpointError, RequestError
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.spec import RowSpec, StateSpec
from foreword.models.adapters import Lora
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint, ModelFile
from foreword.progress import Progress


class ParallelKvStore(TorchKvStore):
    """KV memory with the same pages on all ranks. Drafter rows are only on the first rank."""

    def __init__(self, first_store: TorchKvStore, number: int, workers: Workers) -> None:
        """`first_store` is the first rank's store, whose memory this one shares; all ranks know it by `number`."""
        vars(self).update(vars(first_store))
        self.first_store = first_store  # its `move` copies rows only on the first rank
        self.number = number
        self._workers = workers
        weakref.finalize(self, workers.forget, number)

    def move(self, copies: Tensor) -> None:
        if len(copies):
            self._workers.run(
                MoveRows(self.number), lambda: self.first_store.move(copies), packed_moves(copies)
            )


class TensorParallelDecoder:
    """A `Decoder` that sends every pass to all ranks."""

    is_shape_invariant = False  # as for the torch decoder

    def __init__(
        self,
        checkpoint: ModelFile,
        config: ModelConfig,
        first_rank: RankDecoder,
        number: int,
        workers: Workers,
    ) -> None:
        """`first_rank` is the first rank's share of decoder `number`; `config` is that of the undivided model."""
        self.config = config
        self.workers = workers
        self._checkpoint = checkpoint
        self._first_rank = first_rank
        self._number = number
        weakref.finalize(self, workers.forget, number)

    @property
    def device(self) -> torch.device:
        return self._first_rank.device

    @property
    def weight_bytes(self) -> int:
        return self._first_rank.weight_bytes * self.workers.size

    @property
    def layer_bytes(self) -> int:
        return self._first_rank.layer_bytes * self.workers.size

    def with_layers(self, layers: Sequence[int]) -> "TensorParallelDecoder":
        number, first_rank = self.workers.new_number(), self._first_rank
        order = TakeLayers(number, self._number, list(layers))
        decoder = self.workers.run(order, lambda: first_rank.with_layers(layers))
        return TensorParallelDecoder(
            self._checkpoint, self.config.with_layers(layers), decoder, number, self.workers
        )

    def beside(self, checkpoint: Checkpoint) -> "TensorParallelDecoder":
        raise _unsupported("a drafter that computes in fewer bits")

    def followed_by(self, checkpoint: Checkpoint) -> "TensorParallelDecoder":
        raise _unsupported("a drafter with layers of its own after the target's")

    @cached_property
    def heads(self) -> "ParallelHeads":
        """Return the factory of heads, which run on the first rank with the undivided embedding and output matrix."""
        loader = WeightLoader(self._checkpoint, self._first_rank.weights.dtype, self.device)
        outer = load_outer_matrices(loader, self._checkpoint.config)
        return ParallelHeads(self.config, outer, bucketed=self.device.type == "cuda")

    def set_adapter(self, slot: int, adapter: Lora | None) -> None:
        shares = [
            None if adapter is None else adapter_share(adapter, self.config, Shard(rank, self.workers.size))
            for rank in range(self.workers.size)
        ]
        payloads = [packed_adapter(share) for share in shares[1:]]
        order = SetRankAdapter(self._number, slot)
        self.workers.run(order, lambda: self._first_rank.set_adapter(slot, shares[0]), payloads)

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> Sequence[DecodeSize]:
        return ()

    def kv_rows(self) -> RowSpec:
        return self._first_rank.kv_rows()

    def state_spec(self) -> StateSpec | None:
        return self._first_rank.state_spec()

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> ParallelKvStore:
        """Allocate memory on every rank; `extra` rows only on the first."""
        number = self.workers.new_number()
        first_store = self.workers.run(
            MakeStore(number, self._number, num_pages, page_size, list(states)),
            lambda: self._first_rank.new_kv_store(num_pages, page_size, extra, states),
        )
        return ParallelKvStore(first_store, number, self.workers)

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        if not isinstance(store, ParallelKvStore) or store.spec.decoder != self._first_rank.kv_rows():
            raise ValueError("the KV store was made for another decoder")
        check_taps(batch.taps, self.config.num_layers)
        drawn = batch.drawn_before
        order = Forward(
            decoder=self._number,
            store=store.number,
            sizes=list(batch.arrays.sizes),
            adapters=list(batch.adapters),
            drawn=0 if drawn is None else len(drawn),
            chunks=list(map(list, batch.chunks)),
            ring_copies=list(map(list, batch.ring_copies)),
        )

        def run_here() -> ForwardOutput:
            if drawn is not None:
                self.workers.exchange.broadcast(drawn)
            return self._first_rank.forward(batch, store.first_store)

        return self.workers.run(order, run_here, packed_batch(batch))

    def when_lost(self, callback: Callable[[str], None]) -> None:
        self.workers.when_lost(callback)

    def close(self) -> None:
        self.workers.close()


class ParallelHeads(TorchHeads):
    """Loads heads for a decoder on several ranks."""

    def exit(self, checkpoint: Checkpoint, layer: int, row_name: str) -> None:
        raise _unsupported("a drafter with layers of its own after the target's")


def _unsupported(feature: str) -> RequestError:
    return RequestError(
        f"{feature} cannot run with tensor parallelism; use another drafter or tensor_parallel_size 1"
    )


def load_parallel(
    checkpoint: ModelFile, workers: Workers, dtype: torch.dtype, progress: Progress | None = None
) -> TensorParallelDecoder:
    """Load each rank's share of a model that has been checked (`loading.load_on_ranks`)."""
    number = workers.new_number()
    order = LoadShard(number, str(checkpoint.path.resolve()), str(dtype).removeprefix("torch."))
    try:
        first_rank = workers.run(
            order, lambda: load_rank(checkpoint, workers.exchange, dtype, workers.device, progress)
        )
    except RankFault as fault:
        raise CheckpointError(str(fault)) from None
    return TensorParallelDecoder(checkpoint, checkpoint.config, first_rank, number, workers)
