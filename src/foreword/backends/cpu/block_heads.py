"""Heads that no compiled pass runs: in torch, over the rows of the CPU kernels' store."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foreword.backends.cpu.kv_store import CpuKvStore
from foreword.backends.interface import KvStore
from foreword.backends.torch.heads import LentEnds, PagedRows, TorchHead

if TYPE_CHECKING:
    from foreword.kernels import _native

_NO_ROW = -1


@dataclass(frozen=True)
class _Rows:
    """One layer's keys [pages, kv heads, numbers, rows], or its values, whose last two are exchanged."""

    array: Tensor
    head_dim: int  # a head is filled up to more numbers than it has
    are_keys: bool

    def __getitem__(self, slots: Tensor) -> Tensor:
        page, row = self._places(slots.clamp(min=0))
        numbers = slice(self.head_dim)
        found = self.array[page, :, numbers, row] if self.are_keys else self.array[page, :, row, numbers]
        return found.masked_fill((slots == _NO_ROW)[..., None, None], 0.0)

    def __setitem__(self, slots: Tensor, rows: Tensor) -> None:
        page, row = self._places(slots)
        numbers = slice(self.head_dim)
        if self.are_keys:
            self.array[page, :, numbers, row] = rows
        else:
            self.array[page, :, row, numbers] = rows

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        size = self.array.shape[3 if self.are_keys else 2]
        return slots // size, slots % size


class CpuBlockHead(TorchHead):
    """A head in float32; what the decoder lends it stays packed."""

    def _paged(self, store: KvStore) -> PagedRows:
        if not isinstance(store, CpuKvStore):
            raise ValueError("the KV store was made for another backend")
        keys, values = store.arrays(self._rows)
        dim = self.spec.layers[0].attention.head_dim
        layers = [
            (_Rows(key, dim, are_keys=True), _Rows(value, dim, are_keys=False))
            for key, value in zip(keys.unbind(), values.unbind(), strict=True)
        ]
        return PagedRows(layers, store.page_size, _NO_ROW, _NO_ROW)


def packed_ends(embedding: "_native.PackedMatrix", output: "_native.PackedMatrix", isa: str) -> LentEnds:
    """A decoder's packed embedding and output matrix, for a head in torch."""

    def embed(ids: Tensor) -> Tensor:
        found = torch.empty(len(ids), embedding.cols)
        for row, token in enumerate(ids.tolist()):
            embedding.expand_row(token, found[row], isa)
        return found

    def project(states: Tensor) -> Tensor:
        logits = torch.empty(len(states), output.rows)
        output.multiply(states.contiguous(), logits, isa)
        return logits

    return LentEnds(embed, project, torch.device("cpu"), torch.float32)
