"""A decoder on several ranks. The first rank is in this process and samples."""

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
from foreword.backends.parallel.shards import Shard, adapter_share, check_size
from foreword.backends.parallel.workers import RankFault, Workers
from foreword.backends.support import require_supported
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
    """The first rank's KV memory, with drafter rows, and the same pages on all other ranks."""

    def __init__(self, own: TorchKvStore, number: int, workers: Workers) -> None:
        vars(self).update(vars(own))
        self.own = own  # same memory; moving its rows moves only the first rank's
        self.number = number
        self._workers = workers
        weakref.finalize(self, workers.forget, number)

    def move(self, copies: Tensor) -> None:
        if len(copies):
            self._workers.run(MoveRows(self.number), lambda: self.own.move(copies), packed_moves(copies))


class TensorParallelDecoder:
    """A `Decoder` that sends every pass to all ranks."""

    is_shape_invariant = False  # as in the torch decoder

    def __init__(
        self, whole: ModelFile, config: ModelConfig, own: RankDecoder, number: int, workers: Workers
    ) -> None:
        """`own` is the first rank's share of decoder `number`; `config` describes the whole."""
        self.config = config
        self.workers = workers
        self._whole = whole
        self._own = own
        self._number = number
        weakref.finalize(self, workers.forget, number)

    @property
    def device(self) -> torch.device:
        return self._own.device

    @property
    def weight_bytes(self) -> int:
        return self._own.weight_bytes * self.workers.size

    @property
    def layer_bytes(self) -> int:
        return self._own.layer_bytes * self.workers.size

    def with_layers(self, layers: Sequence[int]) -> "TensorParallelDecoder":
        number, own = self.workers.new_number(), self._own
        order = TakeLayers(number, self._number, list(layers))
        taken = self.workers.run(order, lambda: own.with_layers(layers))
        return TensorParallelDecoder(
            self._whole, self.config.with_layers(layers), taken, number, self.workers
        )

    def beside(self, checkpoint: Checkpoint) -> "TensorParallelDecoder":
        raise _refusal("a drafter that computes in fewer bits")

    def followed_by(self, more: Checkpoint) -> "TensorParallelDecoder":
        raise _refusal("a drafter with layers of its own after the target's")

    @cached_property
    def heads(self) -> "ParallelHeads":
        """Factory of heads on the first rank, which has the whole embedding and output matrix for them."""
        loader = WeightLoader(self._whole, self._own.weights.dtype, self.device)
        ends = load_outer_matrices(loader, self._whole.config)
        return ParallelHeads(self.config, ends, bucketed=self.device.type == "cuda")

    def set_adapter(self, slot: int, adapter: Lora | None) -> None:
        shares = [
            None if adapter is None else adapter_share(adapter, self.config, Shard(rank, self.workers.size))
            for rank in range(self.workers.size)
        ]
        payloads = [packed_adapter(share) for share in shares[1:]]
        order = SetRankAdapter(self._number, slot)
        self.workers.run(order, lambda: self._own.set_adapter(slot, shares[0]), payloads)

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> Sequence[DecodeSize]:
        return ()

    def kv_rows(self) -> RowSpec:
        return self._own.kv_rows()

    def state_spec(self) -> StateSpec | None:
        return self._own.state_spec()

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> ParallelKvStore:
        """Allocate memory on every rank; `extra` rows only on the first."""
        number = self.workers.new_number()
        own = self.workers.run(
            MakeStore(number, self._number, num_pages, page_size),
            lambda: self._own.new_kv_store(num_pages, page_size, extra),
        )
        return ParallelKvStore(own, number, self.workers)

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        if not isinstance(store, ParallelKvStore) or store.spec.decoder != self._own.kv_rows():
            raise ValueError("the KV store was made for another decoder")
        check_taps(batch.taps, self.config.num_layers)
        drawn = batch.drawn_before
        count = 0 if drawn is None else len(drawn)
        order = Forward(self._number, store.number, list(batch.arrays.sizes), list(batch.adapters), count)

        def own() -> ForwardOutput:
            if drawn is not None:
                self.workers.exchange.broadcast(drawn)
            return self._own.forward(batch, store.own)

        return self.workers.run(order, own, packed_batch(batch))

    def when_lost(self, callback: Callable[[str], None]) -> None:
        self.workers.when_lost(callback)

    def close(self) -> None:
        self.workers.close()


class ParallelHeads(TorchHeads):
    """Loads heads for a decoder on several ranks."""

    def exit(self, more: Checkpoint, layer: int, rows: str) -> None:
        raise _refusal("a drafter with layers of its own after the target's")


def _refusal(what: str) -> RequestError:
    return RequestError(
        f"{what} cannot run with tensor parallelism; use another drafter or tensor_parallel_size 1"
    )


def load_parallel(
    checkpoint: ModelFile, workers: Workers, dtype: torch.dtype, progress: Progress | None = None
) -> TensorParallelDecoder:
    require_supported(checkpoint.config, "torch")
    check_size(checkpoint.config, workers.size)
    number = workers.new_number()
    order = LoadShard(number, str(checkpoint.path.resolve()), str(dtype).removeprefix("torch."))
    try:
        own = workers.run(
            order, lambda: load_rank(checkpoint, workers.exchange, dtype, workers.device, progress)
        )
    except RankFault as fault:
        raise CheckpointError(str(fault)) from None
    return TensorParallelDecoder(checkpoint, checkpoint.config, own, number, workers)
