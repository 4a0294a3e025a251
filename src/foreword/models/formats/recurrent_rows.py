"""Orders of rows and columns in which files store recurrent layers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreword.models.config import RecurrentSpec


@dataclass(frozen=True)
class GroupedRows:
    """Selected parts of a matrix that is stored group by group (Qwen3-Next: by key head)."""

    groups: int
    widths: tuple[int, ...]  # rows of every part within a group
    parts: tuple[int, ...]  # numbers of the selected parts

    @property
    def rows(self) -> int:
        """Stored rows, of all parts."""
        return self.groups * sum(self.widths)

    def order(self) -> NDArray[np.intp]:
        """Return the stored row of each row."""
        size, first = sum(self.widths), [sum(self.widths[:part]) for part in range(len(self.widths))]
        rows = [
            np.arange(self.groups)[:, None] * size + first[part] + np.arange(self.widths[part])
            for part in self.parts
        ]
        return np.concatenate([part.reshape(-1) for part in rows])


@dataclass(frozen=True)
class TiledHeads:
    """Value heads that are stored by their number within a key head, as in llama.cpp's Qwen3.5.

    The first of every key head, then the second of every key head, and so on.
    """

    key_heads: int
    each: int  # value heads per key head
    width: int  # rows per value head
    first: int = 0  # rows before the value heads, which keep their order

    @property
    def rows(self) -> int:
        return self.first + self.key_heads * self.each * self.width

    def order(self) -> NDArray[np.intp]:
        """Return the stored row of each row."""
        heads = np.arange(self.first, self.rows).reshape(self.each, self.key_heads, self.width)
        return np.concatenate((np.arange(self.first), heads.swapaxes(0, 1).reshape(-1)))


GROUPED_PARTS: dict[str, dict[str, tuple[int, ...]]] = {
    "in_proj_qkvz": {"in_proj_qkv": (0, 1, 2), "in_proj_z": (3,)},
    "in_proj_ba": {"in_proj_b": (0,), "in_proj_a": (1,)},
}
"""Qwen3-Next's fused projections -> our projections, and the parts of the fused one in each."""


def grouped_rows(spec: RecurrentSpec, name: str) -> GroupedRows:
    """Return the rows of a projection within the fused one that holds it; `name` is the projection's last part."""
    fused, parts = next((fused, parts) for fused, parts in GROUPED_PARTS.items() if name in parts)
    each = spec.heads // spec.key_heads
    widths: tuple[int, ...] = (each, each)
    if fused == "in_proj_qkvz":
        widths = spec.key_dim, spec.key_dim, each * spec.value_dim, each * spec.value_dim
    return GroupedRows(spec.key_heads, widths, parts[name])


def tiled_rows(spec: RecurrentSpec) -> dict[str, TiledHeads]:
    """Return the row orders of a recurrent layer with tiled value heads, by name in `linear_attn`."""
    each = spec.heads // spec.key_heads
    values = TiledHeads(spec.key_heads, each, spec.value_dim)
    after_keys = TiledHeads(spec.key_heads, each, spec.value_dim, first=2 * spec.key_width)
    numbers = TiledHeads(spec.key_heads, each, 1)
    return {
        "in_proj_qkv.weight": after_keys,
        "conv1d.weight": after_keys,
        "in_proj_z.weight": values,
        "in_proj_b.weight": numbers,
        "in_proj_a.weight": numbers,
        "A_log": numbers,
        "dt_bias": numbers,
    }


def tiled_columns(spec: RecurrentSpec) -> dict[str, TiledHeads]:
    """Return the column orders of a recurrent layer with tiled value heads, by name in `linear_attn`."""
    return {"out_proj.weight": TiledHeads(spec.key_heads, spec.heads // spec.key_heads, spec.value_dim)}
