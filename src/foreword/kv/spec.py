"""Describes what one token stores in KV memory. The backends' stores own the bytes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

DECODER_ROWS = "decoder"
"""Name of the decoder's own rows."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per stored number."""

SCALE_BYTES = 4
"""Of the scale that a head has in a packed row."""

ROW_ALIGNMENT = 16
"""Bytes at whose multiples packed rows begin: the widest load of a GPU."""


@dataclass(frozen=True)
class RowSpec:
    """KV rows of one kind: a token's keys and values in some layers.

    A latent row (MLA), from which keys and values are computed, is one head without values.
    """

    name: str  # unique within a page
    num_layers: int
    num_kv_heads: int
    head_dim: int  # size of a key
    value_dim: int | None = None  # size of a value; None: as a key
    window: int | None = None  # number of newest rows that are read; None: all
    dtype: str = "float32"  # see ITEM_BYTES
    alignment: int = 1  # heads are padded to a multiple of this many numbers
    packed: bool = False  # kept as 8-bit floats with a scale for every head; computed in `dtype`

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"KV rows in {self.dtype} are not known; use {', '.join(ITEM_BYTES)}")
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.alignment) < 1 or self.values < 0:
            raise ValueError(f"a KV row must have layers, heads and numbers: {self}")

    @property
    def values(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    def packed_bytes(self, numbers: int) -> int:
        """Return the bytes of a packed row of one layer: numbers and a scale of every head, padding."""
        return -(-self.num_kv_heads * (numbers + SCALE_BYTES) // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def bytes_per_row(self) -> int:
        """Bytes per token over all layers."""
        sizes = self.head_dim, self.values
        if self.packed:
            return self.num_layers * sum(map(self.packed_bytes, sizes))
        room = sum(-(-numbers // self.alignment) * self.alignment for numbers in sizes)
        return self.num_layers * self.num_kv_heads * room * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StateSpec:
    """Memory of recurrent layers: per token a row in a ring, per chunk a state."""

    num_layers: int
    channels: int  # numbers that enter the convolution
    kernel: int  # positions that the convolution reads
    heads: int
    value_dim: int
    key_heads: int = 0  # 0: no state but the convolution's inputs
    key_dim: int = 0
    item_bytes: int = 4  # of a convolution input; the other numbers are float32

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one ring row over all layers."""
        numbers = self.key_heads * self.key_dim + self.heads * (self.value_dim + 1)
        return self.num_layers * (self.channels * self.item_bytes + 4 * numbers)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state over all layers."""
        inputs = (self.kernel - 1) * self.channels * self.item_bytes
        return self.num_layers * (inputs + 4 * self.heads * self.key_dim * self.value_dim)


@dataclass(frozen=True)
class PageSpec:
    """All rows of one token: the decoder's, and those of drafters in the same pages.

    They are allocated, shared, moved and freed together.
    """

    decoder: RowSpec
    extra: tuple[RowSpec, ...] = ()

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        if len(set(names)) != len(names):
            raise ValueError(f"two kinds of KV rows have the same name: {', '.join(names)}")

    @staticmethod
    def of(decoder: RowSpec, extra: Iterable[RowSpec] = ()) -> "PageSpec":
        """Return a page specification with the decoder's dtype for extra rows."""
        stored = (replace(row, dtype=decoder.dtype, alignment=decoder.alignment) for row in extra)
        return PageSpec(decoder, tuple(stored))

    @property
    def rows(self) -> tuple[RowSpec, ...]:
        return (self.decoder, *self.extra)

    @property
    def bytes_per_row(self) -> int:
        """Bytes per token over all kinds."""
        return sum(row.bytes_per_row for row in self.rows)

    def index(self, name: str) -> int:
        for place, row in enumerate(self.rows):
            if row.name == name:
                return place
        raise KeyError(f"no KV rows are named {name}; there are {', '.join(row.name for row in self.rows)}")
