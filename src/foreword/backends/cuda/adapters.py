"""LoRA adapters on the CUDA backend: a table with the addresses of every slot's factors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.backends.cuda.kernels.adapters import FIELDS, add_factors
from foreword.errors import RequestError
from foreword.models.adapters import ALL_MODULES, Lora, layer_modules
from foreword.models.config import ModelConfig

MOST_SLOTS = 256
"""Maximum number of adapters at a time. Captured passes read the table, so it neither grows nor moves."""


QKV, OUTPUT, GATE_UP, DOWN = range(3), range(3, 4), range(4, 6), range(6, 7)
RECURRENT_INPUT, CONVOLUTION_INPUT, RECURRENT_OUTPUT = range(7, 11), range(11, 12), range(12, 13)
"""Indices in `ALL_MODULES` of modules whose matrices are concatenated in one product."""

AdaptedModules = tuple[int, range]
"""A layer's index, and the modules of one product as indices in `ALL_MODULES`."""


class AdapterTable:
    """Addresses of the adapters' factors, on the device. A replayed capture reads the current addresses."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        shape = (1 + MOST_SLOTS, config.num_layers, len(ALL_MODULES), FIELDS)
        self.entries = torch.zeros(shape, dtype=torch.int64, device=device)
        self.widths = [
            {module: outputs for module, (outputs, _) in layer_modules(config, layer).items()}
            for layer in range(config.num_layers)
        ]

    def check(self, slot: int) -> None:
        """Raise `RequestError` if the table has no such slot."""
        if not 1 <= slot <= MOST_SLOTS:
            raise RequestError(
                f"the cuda backend holds at most {MOST_SLOTS} adapters at a time; unload one of them"
            )

    def set(self, slot: int, adapter: Lora | None) -> None:
        """Set or (None) clear the entry of a slot.

        The table has addresses only, so the caller keeps the factors until the entry is cleared.
        """
        rows = torch.zeros(self.entries.shape[1:], dtype=torch.int64)
        for (layer, module), factors in (adapter.factors if adapter is not None else {}).items():
            entry = factors.down.data_ptr(), factors.up.data_ptr(), factors.rank
            rows[layer, ALL_MODULES.index(module)] = torch.tensor(entry)
        self.entries[slot].copy_(rows)


@dataclass(frozen=True)
class RowAdapters:
    """The adapters of a pass, by row."""

    table: AdapterTable
    slots: Tensor  # int32 [rows]

    def add(self, adapted: AdaptedModules, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' output for x to y, the product of x with these modules' matrices, in place; return y."""
        layer, modules = adapted
        widths = [self.table.widths[layer].get(ALL_MODULES[module], 0) for module in modules]
        return add_factors(x, y, self.slots, self.table.entries, (layer, modules[0]), widths)
