"""Maps the tensors in safetensors to those of the model: renames, splits and reorders them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import Architecture, ExpertStacks, StoredTensors
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import RotatedRows, rotated_rows
from foreword.models.formats.recurrent_rows import GROUPED_PARTS, GroupedRows, grouped_rows
from foreword.models.layer_shapes import layer_shapes


@dataclass(frozen=True)
class HfLocation:
    """Location of a tensor, and its transformation when it is read."""

    stored: str  # canonical form of the stored name
    rows: tuple[int, int] | None = None  # range of stored rows; None: all
    rotated: RotatedRows | None = None  # order of rows with adjacent rotated pairs
    plus_one: bool = False  # 1 is added to the stored numbers
    expert: int | None = None  # index of an expert, if the stored tensor has all experts of a layer
    every: tuple[int, int] = (0, 1)  # (first, step) of the rows that are read
    grouped: GroupedRows | None = None  # order of rows that are grouped by key head
    transposed: bool = False  # the expert is stored [in, out]

    @property
    def is_plain(self) -> bool:
        """Return whether the tensor is stored as it is used."""
        return self == HfLocation(self.stored)

    def narrowed(self, rows: tuple[int, int]) -> "HfLocation":
        """Return the location of a range of the tensor's rows; if they are rotated, of whole heads."""
        first = 0 if self.rows is None else self.rows[0]
        rotated = None if self.rotated is None else replace(self.rotated, rows=rows[1] - rows[0])
        return replace(self, rows=(first + rows[0], first + rows[1]), rotated=rotated)

    def read(self, stored: Tensor) -> Tensor:
        """Return the tensor from the stored one."""
        if self.rows is not None:
            stored = stored[slice(*self.rows)]
        if self.rotated is not None:
            stored = _half_apart(stored, self.rotated)
        if self.grouped is not None:
            stored = stored[torch.from_numpy(self.grouped.order())]
        first, step = self.every
        if step > 1:
            stored = stored[first::step]
        return stored + 1 if self.plus_one else stored


def canonical_name(stored: str, rules: StoredTensors) -> str:
    """Return the canonical form of a stored name; a fused tensor keeps the name that is split later."""
    for stored_part, canonical_part in rules.renamed:
        stored = stored.replace(stored_part, canonical_part)
    return stored


def tensor_locations(
    names: Iterable[str], family: Architecture, config: ModelConfig
) -> dict[str, HfLocation]:
    """Return the location of every tensor of the model; `names` are the stored names in canonical form."""
    locations: dict[str, HfLocation] = {}
    for name in names:
        locations |= _split(name, family.stored, config)
    rotated = rotated_rows(config.layers[0].attention) if family.rope.interleaved else {}
    for name, location in locations.items():
        part = name.split(".", 3)[-1]
        if part in rotated:
            locations[name] = replace(location, rotated=rotated[part])
        elif family.stored.norms_minus_one and name.endswith("norm.weight") and "linear_attn" not in name:
            locations[name] = replace(location, plus_one=True)
    return locations


_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_STACK = re.compile(r"(model\.layers\.\d{1,9}\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias)?")
_STACKED = {
    "gate_up_proj": {"gate_proj": (0, 2), "up_proj": (1, 2)},
    "down_proj": {"down_proj": (0, 1)},
}
"""Stack -> its parts, each with (index of the part, number of parts)."""


def expert_locations(
    names: Iterable[str], stacks: ExpertStacks, shape: Callable[[str], list[int]]
) -> dict[str, HfLocation]:
    """Return the location of each expert's tensors in stacks with this layout; `shape` returns the shape of a stack."""
    locations = {}
    for name in names:
        if (stack := _STACK.fullmatch(name)) is None:
            continue
        suffix = "weight" if stack[3] is None else "bias"
        count, rows = (*shape(name), 0, 0)[:2]  # zeros: a damaged file may have too few dimensions
        for expert in range(count):
            for part, (index, parts) in _STACKED[stack[2]].items():
                if stacks is ExpertStacks.HALVES:
                    part_rows = None if parts == 1 else (index * rows // 2, (index + 1) * rows // 2)
                    location = HfLocation(name, part_rows, expert=expert)
                else:  # the rows of the parts alternate
                    location = HfLocation(name, expert=expert, every=(index, parts), transposed=True)
                locations[f"{stack[1]}{expert}.{part}.{suffix}"] = location
    return locations


def _split(name: str, rules: StoredTensors, config: ModelConfig) -> dict[str, HfLocation]:
    """Return the locations of the model's tensors in a stored one, by name."""
    stem, _, suffix = name.rpartition(".")
    if (
        rules.grouped_by_key
        and config.recurrent is not None
        and (parts := GROUPED_PARTS.get(stem.split(".")[-1]))
    ):
        return {
            f"{stem.rpartition('.')[0]}.{part}.{suffix}": HfLocation(
                name, grouped=grouped_rows(config.recurrent, part)
            )
            for part in parts
        }
    fused = next((part for part in rules.fused if stem.endswith("." + part)), None)
    if fused is None:
        return {name: HfLocation(name)}
    prefix = stem.removesuffix(fused)
    numbered = _LAYER.match(name)
    layer = config.layers[0 if numbered is None else int(numbered[1])]
    shapes = layer_shapes(layer, config.hidden_size)
    locations, start = {}, 0
    for part in rules.fused[fused]:
        end = start + shapes[f"{part}.weight"][0]
        locations[f"{prefix}{part}.{suffix}"] = HfLocation(name, (start, end))
        start = end
    return locations


def _half_apart(rows: Tensor, rotated: RotatedRows) -> Tensor:
    """Reorder rows so that rotated pairs, which are stored next to each other, are half a head apart."""
    if len(rows) != rotated.rows:
        raise CheckpointError(
            f"{len(rows)} rows are not {rotated.rows // rotated.head} heads of {rotated.head}; "
            "the file is damaged, get it again"
        )
    return rows[torch.from_numpy(rotated.order())]
