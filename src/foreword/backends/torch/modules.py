"""Draft heads whose layers have experts or latent attention, in plain torch: MTP modules of such models."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.backends.torch.adapters import Additions
from foreword.backends.torch.attention import GroupView, PagedKv
from foreword.backends.torch.heads import LentEnds, PagedRows, TorchHead
from foreword.backends.torch.layers import TorchLayers
from foreword.backends.torch.rotation import CosSin, Rotations
from foreword.backends.torch.weights import load_layer
from foreword.models.heads.opening import Head

_LAYERS = "layers."


@dataclass(frozen=True)
class _ModuleTensors:
    """The tensors of a head's layers."""

    head: Head
    ends: LentEnds

    @property
    def hidden_size(self) -> int:
        return self.head.spec.hidden_size

    def tensor(self, name: str) -> Tensor:
        return self.head.load(name, self.ends.dtype).to(self.ends.device)

    def floats(self, name: str) -> Tensor:
        return self.head.load(name).to(self.ends.device)

    def nothing(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.ends.dtype, device=self.ends.device)


class TorchModule(TorchHead):
    """A head that runs its layers as a decoder does."""

    def __init__(self, head: Head, rows: str, ends: LentEnds, bucketed: bool) -> None:
        super().__init__(head, rows, ends, bucketed)
        spec, source = head.spec, _ModuleTensors(head, ends)
        self._loaded = [
            load_layer(source, layer, f"{_LAYERS}{index}.") for index, layer in enumerate(spec.layers)
        ]
        self._own_layers = TorchLayers(spec.layers, self._loaded, spec.norm.eps)
        self._rotations = Rotations(spec.layers, spec.rope, ends.device)

    def _reads(self, name: str) -> bool:
        """All but what is in the layers."""
        return super()._reads(name) and not name.startswith(_LAYERS)

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        return super().weight_bytes + sum(layer.nbytes for layer in self._loaded)

    def _turns(self, positions: Tensor) -> CosSin:
        turns = self._rotations.of(positions, self._ends.dtype)[0]
        assert turns is not None
        return turns

    def _run_layers(
        self,
        stream: Tensor,
        attention_input: Tensor,
        cos_sin: CosSin,
        paged: PagedRows,
        slots: Tensor,
        views: list[GroupView],
    ) -> Tensor:
        for index, (keys, values) in enumerate(paged.layers):
            kv = PagedKv(keys, values, slots, views)
            stream = self._own_layers.run(index, stream, cos_sin, kv, Additions())
        return stream
