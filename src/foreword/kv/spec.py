"""What one token keeps in KV memory. The stores of the backends own the bytes; nothing else describes them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

DECODER_ROWS = "decoder"
"""Name of the rows that the decoder of a store reads and writes itself."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one stored number."""


@dataclass(frozen=True)
class RowSpec:
    """Rows of one kind: the keys and values that one token has in some layers.

    A latent row, from which keys and values are both computed, is one head without values.
    """

    name: str  # unique within a page
    num_layers: int
    num_kv_heads: int
    head_dim: int  # numbers of a key
    value_dim: int | None = None  # numbers of a value; None: as many as a key has
    window: int | None = None  # only this many of the newest rows are ever read; None: all
    dtype: str = "float32"  # see ITEM_BYTES
    alignment: int = 1  # a head takes the room of a multiple of this many numbers

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"KV rows in {self.dtype} are not known; use {', '.join(ITEM_BYTES)}")
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.alignment) < 1 or self.values < 0:
            raise ValueError(f"a KV row must have layers, heads and numbers: {self}")

    @property
    def values(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def bytes_per_row(self) -> int:
        """Memory that one token takes in all layers."""
        room = sum(-(-numbers // self.alignment) * self.alignment for numbers in (self.head_dim, self.values))
        return self.num_layers * self.num_kv_heads * room * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class PageSpec:
    """All rows that one token has: the decoder's own, and those of others (a draft head's) in the same pages.

    They are taken, shared, moved and given back together.
    """

    decoder: RowSpec
    extra: tuple[RowSpec, ...] = ()

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        if len(set(names)) != len(names):
            raise ValueError(f"two kinds of KV rows have the same name: {', '.join(names)}")

    @staticmethod
    def of(decoder: RowSpec, extra: Iterable[RowSpec] = ()) -> "PageSpec":
        """A page whose extra rows are stored in the numbers of the decoder's."""
        stored = (replace(row, dtype=decoder.dtype, alignment=decoder.alignment) for row in extra)
        return PageSpec(decoder, tuple(stored))

    @property
    def rows(self) -> tuple[RowSpec, ...]:
        """All kinds, the decoder's first."""
        return (self.decoder, *self.extra)

    @property
    def bytes_per_row(self) -> int:
        """Memory that one token takes in all kinds."""
        return sum(row.bytes_per_row for row in self.rows)

    def index(self, name: str) -> int:
        """Place of a kind among `rows`."""
        for place, row in enumerate(self.rows):
            if row.name == name:
                return place
        raise KeyError(f"no KV rows are named {name}; there are {', '.join(row.name for row in self.rows)}")
