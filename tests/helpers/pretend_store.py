"""The KV store of targets that keep their rows in plain values."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.kv.spec import DECODER_ROWS, PageSpec, RowSpec

PRETEND_ROWS = RowSpec(DECODER_ROWS, num_layers=1, num_kv_heads=1, head_dim=1)


@dataclass(frozen=True)
class PretendStore:
    """Sizes alone."""

    num_pages: int
    page_size: int
    extra: Sequence[RowSpec] = ()

    @property
    def spec(self) -> PageSpec:
        return PageSpec.of(PRETEND_ROWS, self.extra)

    @property
    def bytes_per_row(self) -> int:
        return self.spec.bytes_per_row
