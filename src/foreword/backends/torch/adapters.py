"""Applies LoRA adapters in the torch decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from foreword.backends.batch import ForwardBatch
from foreword.models.adapters import Factors, Lora

AdaptedRows = tuple[Tensor, Lora]
"""Indices of rows in a pass, int64 [rows], and the adapter of these rows."""


@dataclass(frozen=True)
class LayerAdapters:
    """The adapters of a pass's rows, applied to one layer; usually there are none."""

    groups: Sequence[AdaptedRows] = ()  # one for each adapter
    layer: int = 0  # index of the layer

    def at(self, layer: int) -> "LayerAdapters":
        """Return the same adapters, applied to another layer."""
        return replace(self, layer=layer) if self.groups else self

    def add(self, parts: Sequence[tuple[str, int]], inputs: Tensor, outputs: Tensor) -> None:
        """Add the adapters' outputs for `inputs` to `outputs` in place.

        `parts` are (module, width) of the modules whose outputs are side by side in `outputs`.
        """
        for rows, adapter in self.groups:
            begin = 0
            for module, width in parts:
                factors = adapter.factors.get((self.layer, module))
                if factors is not None:
                    added = linear(linear(inputs[rows], factors.down), factors.up)
                    outputs[rows, begin : begin + width] += added
                begin += width


def pass_adapters(batch: ForwardBatch, adapters: Mapping[int, Lora], device: torch.device) -> LayerAdapters:
    """Return the adapters of a pass's rows; `batch` is on the CPU."""
    if not any(batch.adapters):
        return LayerAdapters()
    starts = batch.row_starts.tolist()
    rows: dict[int, list[int]] = {}
    for request, slot in enumerate(batch.adapters):
        if slot:
            rows.setdefault(slot, []).extend(range(starts[request], starts[request + 1]))
    return LayerAdapters(
        [(torch.tensor(row_list, device=device), adapters[slot]) for slot, row_list in rows.items()]
    )


def on_device(adapter: Lora, dtype: torch.dtype, device: torch.device) -> Lora:
    """Return the adapter with its factors on a device."""
    return Lora(
        {
            module: Factors(factors.down.to(device, dtype), factors.up.to(device, dtype))
            for module, factors in adapter.factors.items()
        }
    )
