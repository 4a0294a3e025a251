"""KV memory in torch tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

from foreword.backends.torch.recurrent_rows import RecurrentStore
from foreword.kv.spec import SCALE_BYTES, PageSpec, RowSpec


def move_rows(memory: Tensor, copies: Tensor) -> None:
    """Copy rows (from, to) of one array [layers, physical rows, ...]; all are read before any is written."""
    source, target = copies.long().unbind(1)
    memory[:, target] = memory[:, source]


class TorchKvStore:
    """KV rows of the decoder and of drafters; arrays are [layers, physical rows, kv heads, numbers].

    Two extra rows follow the pages: one to which padding writes, and one of zeros, which is read for missing rows.
    """

    def __init__(
        self,
        spec: PageSpec,
        num_pages: int,
        page_size: int,
        device: torch.device,
        move: Callable[[Tensor, Tensor], None] = move_rows,
        recurrent: RecurrentStore | None = None,
    ) -> None:
        """`move` copies rows of one array as `move_rows` does; `recurrent` is the memory of recurrent layers."""
        self.recurrent = recurrent
        self._move = move
        self.spec = spec
        self.num_pages = num_pages
        self.page_size = page_size
        self.spare_slot = num_pages * page_size  # padding writes here
        self.empty_slot = self.spare_slot + 1  # zeros
        self._arrays = {row.name: self._allocate(row, device) for row in spec.rows}

    @property
    def bytes_per_row(self) -> int:
        return self.spec.bytes_per_row

    def arrays(self, name: str) -> tuple[Tensor, Tensor]:
        return self._arrays[name]

    def move(self, copies: Tensor) -> None:
        """Copy rows (from, to) of all kinds, int32 [copies, 2]; all are read before any is written."""
        if len(copies):
            for pair in self._arrays.values():
                for array in pair:
                    self._move(array, copies)

    def _allocate(self, row: RowSpec, device: torch.device) -> tuple[Tensor, Tensor]:
        dtype: torch.dtype = torch.uint8 if row.packed else getattr(torch, row.dtype)

        def rows(dim: int) -> Tensor:
            """Allocate keys or values of heads with `dim` numbers; a packed row is bytes, padded at its end."""
            head_width = dim + SCALE_BYTES if row.packed else dim
            used_width = row.num_kv_heads * head_width
            shape = (row.num_layers, self.empty_slot + 1)
            width = row.packed_bytes(dim) if row.packed else used_width
            memory = torch.empty((*shape, width), dtype=dtype, device=device)
            memory[:, self.spare_slot :] = 0
            return memory[..., :used_width].view(*shape, row.num_kv_heads, head_width)

        return rows(row.head_dim), rows(row.values)
