"""The llama-family decoder on the compiled CPU kernels: one native call per pass."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from foreword.backends.batch import (
    ConcatenatedStates,
    ForwardBatch,
    ForwardOutput,
    check_shares,
    num_share_parts,
)
from foreword.backends.cpu.adapters import AdapterPacker
from foreword.backends.cpu.head_factory import CpuHeads
from foreword.backends.cpu.kv_store import HEAD_ALIGNMENT, CpuKvStore
from foreword.backends.cpu.packing import FORMATS, MatrixPacker, WeightFormat, resolve_format
from foreword.backends.cpu.resident import release_unused
from foreword.backends.cpu.weights import CpuWeights, load_layers, load_outer_matrices, native_decoder
from foreword.backends.interface import DecodeSize, KvStore
from foreword.backends.memory import kv_rows, state_spec
from foreword.backends.support import require_supported
from foreword.errors import RequestError
from foreword.kernels.native import choose_isa, choose_threads, native_status
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.spec import PageSpec, RowSpec, StateSpec
from foreword.models.adapters import Lora
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.progress import Progress


class CpuDecoder:
    """A decoder on the CPU kernels."""

    is_shape_invariant = True  # tests/integration/test_shape_invariance.py

    def __init__(
        self, config: ModelConfig, weights: CpuWeights, number_format: WeightFormat, threads: int
    ) -> None:
        self.config = config
        self.number_format = number_format
        require_supported(config)
        self._weights = weights
        self._native = native_decoder(config, weights, threads)

    def set_adapter(self, slot: int, adapter: Lora | None) -> None:
        """Set or (None) remove the adapter of a slot."""
        packed = None
        if adapter is not None:
            packer = AdapterPacker(self.isa, self.threads, self.number_format.is_float32)
            packed = packer.layers(adapter, self._weights.layers)
        self._native.set_adapter(slot, packed)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the layers' matrices."""
        return self._weights.layer_bytes

    def with_layers(self, layers: Sequence[int]) -> "CpuDecoder":
        """Return a decoder that runs only these layers, with shared weights."""
        weights = self._weights.with_layers(layers)
        return CpuDecoder(self.config.with_layers(layers), weights, self.number_format, self.threads)

    def with_threads(self, threads: int) -> "CpuDecoder":
        """Return a decoder with a pool of this many threads, and shared weights."""
        return CpuDecoder(self.config, self._weights, self.number_format, threads)

    def beside(self, checkpoint: Checkpoint) -> "CpuDecoder":
        """Return a decoder with the layers of `checkpoint`, and this one's embedding, output matrix and final norm."""
        return load_cpu_decoder(checkpoint, FORMATS["stored"], threads=self.threads, outer=self._weights)

    def followed_by(self, checkpoint: Checkpoint) -> "CpuDecoder":
        """Return a decoder with this one's layers, then the layers and final norm of `checkpoint`."""
        weights = self._weights.followed_by(checkpoint, self.number_format, self.isa, self.threads)
        config = self.config.followed_by(checkpoint.config)
        return CpuDecoder(config, weights, self.number_format, self.threads)

    @property
    def heads(self) -> CpuHeads:
        """Return the factory of draft heads; they have this decoder's number format and use its threads."""
        return CpuHeads(self.config, self._weights, self.number_format, self._native)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def isa(self) -> str:
        return self._native.isa

    @property
    def threads(self) -> int:
        return self._native.threads

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return self._native.weight_bytes

    def sizes_to_prepare(self, requests: int, length: int, rows: int) -> Sequence[DecodeSize]:
        """Return nothing: CPU passes need no preparation."""
        return ()

    def kv_rows(self) -> RowSpec:
        """Return the KV rows of a token in all layers."""
        return replace(kv_rows(self.config, self.number_format.kv_dtype), alignment=HEAD_ALIGNMENT)

    def state_spec(self) -> StateSpec | None:
        """Return the sizes of recurrent states (float32, whatever the KV rows are); None without recurrent layers."""
        return state_spec(self.config, item_bytes=4)

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> CpuKvStore:
        """Allocate memory for this decoder's KV rows and states, and for the KV rows `extra`."""
        spec = PageSpec.of(self.kv_rows(), extra)
        return CpuKvStore(spec, num_pages, page_size, self._weights.new_states(states))

    def forward(self, batch: ForwardBatch, store: KvStore) -> ForwardOutput:
        """Run one pass: copy and write the KV rows of the batch; return its logits and hidden states."""
        if not isinstance(store, CpuKvStore):
            raise ValueError("the KV store was made for another decoder")
        arrays = batch.arrays  # NumPy arrays: passing torch tensors takes longer than a small pass
        taps = list(dict.fromkeys(batch.taps))
        shares = self._new_shares(batch) if batch.wants_shares else None
        logits = np.empty((len(arrays.logit_rows), self.config.vocab_size), dtype=np.float32)
        hidden = np.empty((len(arrays.hidden_rows), len(taps) * self.config.hidden_size), dtype=np.float32)
        self._native.forward(
            store.native,
            arrays,
            taps,
            logits,
            hidden,
            batch.adapters,
            store.states,
            batch.chunks,
            batch.ring_copies,
            shares,
        )
        return ForwardOutput(
            torch.from_numpy(logits),
            ConcatenatedStates(taps, hidden) if taps else {},
            shares=None if shares is None else torch.from_numpy(shares[:, :, 0].sum(1)),
        )

    def _new_shares(self, batch: ForwardBatch) -> NDArray[np.float32]:
        """Return zeros, [requests, heads, 2, parts]: the sums of every head, then memory for the kernels."""
        check_shares(batch)
        heads = max(layer.attention.num_heads for layer in self.config.layers if layer.has_attention)
        return np.zeros((len(batch.kv_lens), heads, 2, num_share_parts(batch)), np.float32)


def load_cpu_decoder(
    checkpoint: Checkpoint,
    number_format: WeightFormat,
    *,
    threads: int | None = None,
    outer: CpuWeights | None = None,
    progress: Progress | None = None,
) -> CpuDecoder:
    """Pack a checkpoint's weights and return its decoder.

    Embedding, output matrix and final norm are those of `outer`, if given.
    """
    config = checkpoint.config
    if number_format.kv_dtype == "int8" and config.layers and config.layers[0].attention.latent is not None:
        raise RequestError(
            f"the KV rows of this {config.architecture} model cannot be kept in 8 bits; leave out --kv-cache-dtype"
        )
    isa, num_threads = choose_isa(native_status().instruction_sets), choose_threads(threads)
    number_format = resolve_format(number_format, checkpoint, isa)
    release_unused()  # else the memory that importing torch needed would add to the peak of loading
    packer = MatrixPacker(checkpoint, number_format, isa, num_threads, progress)
    # The embedding is the largest matrix: while the pages of its file are in memory, little else should be.
    weights = load_outer_matrices(packer, config) if outer is None else outer
    return CpuDecoder(
        config, replace(weights, layers=load_layers(packer, config)), number_format, num_threads
    )
