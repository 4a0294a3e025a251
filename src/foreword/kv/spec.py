"""Describes what one token stores in KV memory. The backends' stores own the bytes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

DECODER_ROWS = "decoder"
"""Name of the decoder's own rows."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Bytes per stored number; `int8` (CPU kernels) has a scale for every token and head, too."""

SCALE_BYTES = 4
"""Bytes of a head's scale in a packed row and in `int8`."""

ROW_ALIGNMENT = 16
"""Packed rows begin at multiples of this many bytes: the widest load of a GPU."""


@dataclass(frozen=True)
class RowSpec:
    """KV rows of one kind: a token's keys and values in some layers.

    A latent row (MLA), from which keys and values are computed, counts as one head without values.
    """

    name: str  # unique within a page
    num_layers: int
    num_kv_heads: int
    head_dim: int  # size of a key
    value_dim: int | None = None  # size of a value; None: as a key
    window: int | None = None  # number of newest rows that are read; None: all
    dtype: str = "float32"  # see ITEM_BYTES
    alignment: int = 1  # heads are padded to a multiple of this many numbers
    packed: bool = False  # stored as 8-bit floats with one scale per head; attention computes in `dtype`

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"KV rows cannot be stored as {self.dtype}; use {', '.join(ITEM_BYTES)}")
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.alignment) < 1 or self.values < 0:
            raise ValueError(f"a KV row needs at least one layer, one head and one number per head: {self}")

    @property
    def values(self) -> int:
        """Size of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def packed_bytes(self, numbers: int) -> int:
        """Return the bytes of one layer's packed keys or values: `numbers` bytes and a scale per head, and padding."""
        return -(-self.num_kv_heads * (numbers + SCALE_BYTES) // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def bytes_per_row(self) -> int:
        """Bytes per token over all layers."""
        sizes = self.head_dim, self.values
        if self.packed:
            return self.num_layers * sum(map(self.packed_bytes, sizes))
        scale_bytes = SCALE_BYTES if self.dtype == "int8" else 0
        head_bytes = sum(
            -(-numbers // self.alignment) * self.alignment * ITEM_BYTES[self.dtype] + scale_bytes
            for numbers in sizes
        )
        return self.num_layers * self.num_kv_heads * head_bytes


@dataclass(frozen=True)
class StateSpec:
    """Memory of recurrent layers: a ring row for each token, a state for each chunk."""

    num_layers: int
    channels: int  # of the convolution
    kernel: int  # size of the convolution kernel, in positions
    heads: int
    value_dim: int
    key_heads: int = 0  # 0: no state but the convolution's inputs
    key_dim: int = 0
    item_bytes: int = 4  # bytes per convolution input; the other numbers are float32

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
    """All KV rows of one token: the decoder's row, and the rows of drafters in the same page.

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
        """Return a page specification whose extra rows have the decoder's dtype and alignment."""
        stored = (replace(row, dtype=decoder.dtype, alignment=decoder.alignment) for row in extra)
        return PageSpec(decoder, tuple(stored))

    @property
    def rows(self) -> tuple[RowSpec, ...]:
        return (self.decoder, *self.extra)

    @property
    def bytes_per_row(self) -> int:
        """Bytes per token over all rows."""
        return sum(row.bytes_per_row for row in self.rows)

    def index(self, name: str) -> int:
        """Return the index of the named row in `rows`, or raise `KeyError`."""
        for index, row in enumerate(self.rows):
            if row.name == name:
                return index
        raise KeyError(f"no KV rows are named {name}; there are {', '.join(row.name for row in self.rows)}")
