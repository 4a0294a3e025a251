"""Medusa's heads on the compiled CPU kernels, in the decoder's numbers."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from foreword.backends.cpu.heads import HeadPacker
from foreword.backends.interface import HeadOutput, MedusaCall
from foreword.models.heads.opening import Head

if TYPE_CHECKING:
    from foreword.kernels import _native


class CpuMedusa:
    """Heads that read nothing but hidden states; every matrix is packed as the decoder's are."""

    def __init__(self, head: Head, packer: HeadPacker, output: "_native.PackedMatrix") -> None:
        """`output` is the decoder's output matrix, for heads that have none of their own."""
        self.spec = spec = head.spec
        self._isa = packer.isa
        self._heads = [
            (
                [packer.matrix(f"blocks.{number}.layers.{block}") for block in range(spec.blocks_per_head)],
                packer.optional(f"lm_heads.{number}") or output,
            )
            for number in range(spec.num_heads)
        ]
        self.weight_bytes = packer.nbytes

    def draft(self, call: MedusaCall) -> HeadOutput:
        """Return logits: chains are drawn from them."""
        read = call.states.contiguous().numpy()
        logits = np.empty((len(self._heads), len(read), self.spec.draft_vocab_size), np.float32)
        for number, (blocks, output) in enumerate(self._heads):
            stream = read
            for block in blocks:
                inner = np.empty_like(stream)
                block.multiply(stream, inner, self._isa)
                stream = stream + inner / (1 + np.exp(-inner))
            output.multiply(stream, logits[number], self._isa)
        return HeadOutput(torch.from_numpy(logits).transpose(0, 1), call.states)
