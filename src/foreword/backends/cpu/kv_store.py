"""KV memory of the CPU kernels."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foreword.errors import RequestError
from foreword.kv.spec import PageSpec, RowSpec

if TYPE_CHECKING:
    from foreword.kernels import _native

HEAD_ALIGNMENT = 8
"""Head dimensions are padded to a multiple of this, the width of the kernels' vectors."""


class CpuKvStore:
    """Keys and values in the layout of the attention kernel.

    Keys are [layers, pages, kv heads, padded head dim, rows of a page]; values have the last two dimensions exchanged.
    Latent rows are keys without values. In int8, a head's numbers in a page are followed by the scales of its rows.
    """

    def __init__(
        self,
        spec: PageSpec,
        num_pages: int,
        page_size: int,
        states: "_native.StateStore | None" = None,
    ) -> None:
        """Allocate KV memory; `states` is the memory of recurrent layers, if any."""
        from foreword.kernels import _native

        if page_size != _native.PAGE_SIZE:
            raise RequestError(f"the CPU kernels need pages of {_native.PAGE_SIZE} rows, not {page_size}")
        for row in spec.rows:
            _require_supported(row)
        self.spec = spec
        self.states = states
        self.num_pages = num_pages
        self.page_size = page_size
        kinds = [(row.num_layers, row.num_kv_heads, row.head_dim, row.values == 0) for row in spec.rows]
        self.native = _native.KvStore(num_pages, kinds, spec.decoder.dtype)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token's KV rows of all kinds."""
        return self.native.bytes_per_row

    def arrays(self, name: str) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of one kind, in the layout above."""
        keys, values = self.native.arrays(self.spec.index(name))
        dtype = getattr(torch, self.spec.decoder.dtype)  # NumPy has no bfloat16
        return torch.from_numpy(keys).view(dtype), torch.from_numpy(values).view(dtype)

    def move(self, copies: Tensor) -> None:
        """Copy rows (from, to) of all kinds, int32 [copies, 2]; all are read before any is written."""
        self.native.copy_rows(copies.numpy())


def _require_supported(row: RowSpec) -> None:
    if row.values not in (0, row.head_dim):
        raise RequestError(
            f"KV rows {row.name}: the CPU kernels need keys and values of the same size, or no values, "
            f"not {row.head_dim} and {row.values}"
        )
