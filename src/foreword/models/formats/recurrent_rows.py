"""Orders of rows and columns in which files store recurrent layers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreword.models.config import RecurrentSpec


@dataclass(frozen=True)
class GroupedRows:
    """Selected parts of a fused matrix that is stored group by group (Qwen3-Next: by key head)."""

    groups: int
    widths: tuple[int, ...]  # rows of every part within a group
    parts: tuple[int, ...]  # indices of the selected parts

    @property
    def rows(self) -> int:
        """Number of stored rows, of all parts."""
        return self.groups * sum(self.widths)

    def order(self) -> NDArray[np.intp]:
        """Return the index of the stored row for each row of the selected parts, part by part."""
        group_starts = np.arange(self.groups)[:, None] * sum(self.widths)
        rows = []
        for part in self.parts:
            first = sum(self.widths[:part])  # row of the part within a group
            rows.append((group_starts + first + np.arange(self.widths[part])).reshape(-1))
        return np.concatenate(rows)


@dataclass(frozen=True)
class TiledHeads:
    """Rows of value heads in llama.cpp's Qwen3.5: first the first value head of every key head, then the second, ..."""

    key_heads: int
    heads_per_key: int  # value heads per key head
    width: int  # rows per value head
    first: int = 0  # number of other rows before the value heads; their order is not changed

    @property
    def rows(self) -> int:
        """Number of rows, including those before the value heads."""
        return self.first + self.key_heads * self.heads_per_key * self.width

    def order(self) -> NDArray[np.intp]:
        """Return the index of the stored row for each row in Hugging Face's order."""
        heads = np.arange(self.first, self.rows).reshape(self.heads_per_key, self.key_heads, self.width)
        return np.concatenate((np.arange(self.first), heads.swapaxes(0, 1).reshape(-1)))


GROUPED_PARTS: dict[str, dict[str, tuple[int, ...]]] = {
    "in_proj_qkvz": {"in_proj_qkv": (0, 1, 2), "in_proj_z": (3,)},
    "in_proj_ba": {"in_proj_b": (0,), "in_proj_a": (1,)},
}
"""Fused projection of Qwen3-Next -> projections in it -> indices of the parts that make up each projection."""


def grouped_rows(spec: RecurrentSpec, name: str) -> GroupedRows:
    """Return the rows of a projection, such as `name` = "in_proj_qkv", within its fused projection."""
    fused, parts = next((fused, parts) for fused, parts in GROUPED_PARTS.items() if name in parts)
    heads_per_key = spec.heads // spec.key_heads
    widths: tuple[int, ...] = (heads_per_key, heads_per_key)
    if fused == "in_proj_qkvz":
        values = heads_per_key * spec.value_dim
        widths = spec.key_dim, spec.key_dim, values, values
    return GroupedRows(spec.key_heads, widths, parts[name])


def tiled_rows(spec: RecurrentSpec) -> dict[str, TiledHeads]:
    """Return the row order of each tensor of a recurrent layer with tiled value heads, by name in `linear_attn`."""
    heads_per_key = spec.heads // spec.key_heads
    values = TiledHeads(spec.key_heads, heads_per_key, spec.value_dim)
    after_keys = TiledHeads(spec.key_heads, heads_per_key, spec.value_dim, first=2 * spec.key_width)
    numbers = TiledHeads(spec.key_heads, heads_per_key, 1)
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
    """Return the column order of each tensor with tiled value heads in its columns, by name in `linear_attn`."""
    return {"out_proj.weight": TiledHeads(spec.key_heads, spec.heads // spec.key_heads, spec.value_dim)}
