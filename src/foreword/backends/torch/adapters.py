"""LoRA adapters on the torch decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from foreword.backends.batch import ForwardBatch
from foreword.models.adapters import Factors, Lora

Rows = tuple[Tensor, Lora]
"""int64 [rows] of a pass, and their adapter."""


@dataclass(frozen=True)
class Additions:
    """Low-rank additions to the matrices of one layer; usually empty."""

    groups: Sequence[Rows] = ()
    layer: int = 0

    def at(self, layer: int) -> "Additions":
        return replace(self, layer=layer) if self.groups else self

    def add(self, parts: Sequence[tuple[str, int]], inputs: Tensor, outputs: Tensor) -> None:
        """Add in place to the outputs of adjacent modules, given as (module, width)."""
        for rows, adapter in self.groups:
            begin = 0
            for module, width in parts:
                factors = adapter.factors.get((self.layer, module))
                if factors is not None:
                    added = linear(linear(inputs[rows], factors.down), factors.up)
                    outputs[rows, begin : begin + width] += added
                begin += width


def additions(batch: ForwardBatch, adapters: Mapping[int, Lora], device: torch.device) -> Additions:
    """Return the additions of a pass; `batch` is on the CPU."""
    if not any(batch.adapters):
        return Additions()
    starts = batch.row_starts.tolist()
    rows: dict[int, list[int]] = {}
    for request, slot in enumerate(batch.adapters):
        if slot:
            rows.setdefault(slot, []).extend(range(starts[request], starts[request + 1]))
    return Additions([(torch.tensor(found, device=device), adapters[slot]) for slot, found in rows.items()])


def on_device(adapter: Lora, dtype: torch.dtype, device: torch.device) -> Lora:
    return Lora(
        {
            place: Factors(factors.down.to(device, dtype), factors.up.to(device, dtype))
            for place, factors in adapter.factors.items()
        }
    )
