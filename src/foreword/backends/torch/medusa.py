"""Medusa's heads in plain torch: all of them in one batched product per block."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from foreword.backends.interface import Chains, HeadOutput, MedusaCall
from foreword.backends.torch.heads import LentEnds
from foreword.models.heads.opening import Head


class TorchMedusa:
    """Heads that read nothing but hidden states."""

    def __init__(self, head: Head, ends: LentEnds) -> None:
        self.spec = spec = head.spec
        self._ends = ends

        def stacked(name: str) -> Tensor:
            loaded = [head.load(name.format(number), ends.dtype) for number in range(spec.num_heads)]
            return torch.stack(loaded).to(ends.device)

        def biases(block: int) -> Tensor:
            names = [f"blocks.{number}.layers.{block}.bias" for number in range(spec.num_heads)]
            none = torch.zeros(spec.hidden_size, dtype=ends.dtype)
            loaded = [head.load(name, ends.dtype) if spec.has(name) else none for name in names]
            return torch.stack(loaded).to(ends.device)

        blocks = range(spec.blocks_per_head)
        # [heads, in, out] and [heads, out]
        self._blocks = [
            (stacked(f"blocks.{{}}.layers.{block}.weight").transpose(1, 2), biases(block)) for block in blocks
        ]
        has_outputs = spec.has("lm_heads.0.weight")
        self._outputs = stacked("lm_heads.{}.weight").transpose(1, 2) if has_outputs else None

    @property
    def weight_bytes(self) -> int:
        outputs = 0 if self._outputs is None else self._outputs.nbytes
        return outputs + sum(weight.nbytes + bias.nbytes for weight, bias in self._blocks)

    @torch.inference_mode()
    def draft(self, call: MedusaCall) -> HeadOutput | Chains:
        """Return logits: chains are drawn from them."""
        return HeadOutput(self._logits(call.states, self.spec.num_heads).transpose(0, 1), call.states)

    def _logits(self, states: Tensor, heads: int) -> Tensor:
        """Of the first `heads`: float32 [heads, rows, draft vocabulary]."""
        stream = states.to(self._ends.dtype).expand(heads, -1, -1)
        for weight, bias in self._blocks:
            stream = stream + silu(torch.baddbmm(bias[:heads].unsqueeze(1), stream, weight[:heads]))
        outputs = self._outputs
        return (self._ends.project(stream) if outputs is None else torch.bmm(stream, outputs[:heads])).float()
