"""Medusa heads and early exits on the CPU kernels, and the factory of all heads of a CPU decoder."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from foreword.backends.cpu.head_packing import HeadPacker
from foreword.backends.cpu.heads import CpuHead
from foreword.backends.cpu.kv_store import CpuKvStore
from foreword.backends.cpu.packing import WeightFormat
from foreword.backends.cpu.resident import release_unused
from foreword.backends.cpu.weights import CpuWeights, native_decoder
from foreword.backends.interface import HeadCall, HeadOutput, MedusaCall
from foreword.kv.states import as_array
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head

if TYPE_CHECKING:
    from foreword.kernels import _native


class CpuMedusa:
    """Medusa heads, which read only hidden states."""

    def __init__(self, head: Head, packer: HeadPacker, output: "_native.PackedMatrix") -> None:
        """Pack the heads; `output` is the decoder's output matrix, for heads without their own."""
        self.spec = spec = head.spec
        self._isa = packer.isa
        self._heads = [  # residual blocks and output matrix of each head
            (
                [packer.matrix(f"blocks.{index}.layers.{block}") for block in range(spec.blocks_per_head)],
                packer.optional(f"lm_heads.{index}") or output,
            )
            for index in range(spec.num_heads)
        ]
        self.weight_bytes = packer.nbytes

    def draft(self, call: MedusaCall) -> HeadOutput:
        """Return the logits of all heads, [states, heads, draft vocabulary]."""
        states = call.states.contiguous().numpy()
        logits = np.empty((len(self._heads), len(states), self.spec.draft_vocab_size), np.float32)
        for index, (blocks, output) in enumerate(self._heads):
            stream = states
            for block in blocks:
                inner = np.empty_like(stream)
                block.multiply(stream, inner, self._isa)
                stream = stream + inner / (1 + np.exp(-inner))  # SiLU
            output.multiply(stream, logits[index], self._isa)
        return HeadOutput(torch.from_numpy(logits).transpose(0, 1), call.states)


@dataclass
class CpuExit:
    """An early exit: the target's first layers, then the trained layer of an exit adapter."""

    decoder: "_native.Decoder"  # of these layers
    vocab_size: int
    row_name: str  # name of the KV rows of the trained layer
    weight_bytes: int  # of the trained layer
    is_ready: bool = True

    def draft(self, call: HeadCall) -> HeadOutput:
        """With `are_head_states`, run the layers on the rows' tokens (there are no features).

        Otherwise only compute the trained layer's KV rows from the target's hidden states, without logits.
        """
        rows, store = call.rows, call.store
        if not isinstance(store, CpuKvStore):
            raise ValueError("the KV store was made for another backend")
        states = None if rows.are_head_states else as_array(rows.features)
        logits = torch.empty((len(rows.arrays.logit_rows), self.vocab_size), dtype=torch.float32)
        row_kind = store.spec.index(self.row_name)
        self.decoder.exit(store.native, row_kind, rows.arrays, rows.starts, states, logits.numpy())
        return HeadOutput(logits, logits.new_empty(len(logits), 0))


class CpuHeads:
    """Loads heads for a decoder, in its number format and on its threads."""

    def __init__(
        self, config: ModelConfig, weights: CpuWeights, number_format: WeightFormat, native: "_native.Decoder"
    ) -> None:
        self._config = config
        self._weights = weights
        self._number_format = number_format
        self._native = native

    def head(self, head: Head, row_name: str) -> CpuHead:
        """Load a head whose KV rows have the name `row_name`."""
        target_matrices = self._weights.embedding, self._weights.head
        packed = CpuHead(head, row_name, self._packer(head), self._native, target_matrices)
        release_unused()
        return packed

    def medusa(self, head: Head) -> CpuMedusa:
        """Load Medusa's heads."""
        return CpuMedusa(head, self._packer(head), self._weights.head)

    def exit(self, checkpoint: Checkpoint, layer: int, row_name: str) -> CpuExit | None:
        """Load an exit: the target's first `layer` layers, then the layer of `checkpoint`.

        None for a target with latent attention or recurrent layers.
        """
        if self._config.layers[0].attention.latent is not None or self._config.recurrent is not None:
            return None
        isa, threads = self._native.isa, self._native.threads
        target_layers = self._weights.with_layers(range(layer))
        weights = target_layers.followed_by(checkpoint, self._number_format, isa, threads)
        config = self._config.with_layers(range(layer)).followed_by(checkpoint.config)
        added_bytes = weights.layer_bytes - target_layers.layer_bytes
        return CpuExit(native_decoder(config, weights, threads), config.vocab_size, row_name, added_bytes)

    def _packer(self, head: Head) -> HeadPacker:
        return HeadPacker(head, self._number_format, self._native.isa, self._native.threads)
