"""Finds the tensors of a model in a GGUF file, by Hugging Face's names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import TOP_TENSORS, GgufNames
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import RotatedRows, rotated_rows
from foreword.models.formats.gguf.file import GgufTensor
from foreword.models.formats.recurrent_rows import (
    GroupedRows,
    TiledHeads,
    grouped_rows,
    tiled_columns,
    tiled_rows,
)
from foreword.models.layer_shapes import expected_shapes

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,8})\.")
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(\w+(?:\.\w+)?)\.(weight|bias)")
_BARE_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(ssm_a|ssm_d)")  # names without ".weight"
# GGUF names of stacked experts -> the matrices of each expert in the stack.
_ALL_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
_MOST_EXPERTS = 1 << 16
# The matrix that expands latent rows to keys and values: stored as two tensors, or as one (kv_b).
_KEYS, _VALUES, _BOTH = (f"self_attn.{name}_proj.weight" for name in ("k_b", "v_b", "kv_b"))
_RECURRENT = ".linear_attn."


@dataclass(frozen=True)
class GgufLocation:
    """Location of a tensor, and the order in which it is stored."""

    stored: str  # name in the file
    rows: tuple[int, int] | None = None  # range of stored rows, outer dimensions flattened; None: all
    values: str | None = None  # the second stored tensor, if the expansion of latent rows is stored as two
    order: RotatedRows | GroupedRows | TiledHeads | None = None  # order of rows, or of a vector's numbers
    columns: TiledHeads | None = None  # order of columns; None: that of Hugging Face


def tensor_parts(
    tensors: Mapping[str, GgufTensor], names: GgufNames, path: Path, skipped: Iterable[str]
) -> dict[str, list[str]]:
    """Return stored name -> names of the model's tensors in it, for all stored tensors that are not in `skipped`."""
    skipped = set(skipped)
    return {
        stored: _parts(stored, tensor, names, path)
        for stored, tensor in tensors.items()
        if stored not in skipped
    }


def tensor_locations(
    parts: Mapping[str, list[str]],
    tensors: Mapping[str, GgufTensor],
    names: GgufNames,
    config: ModelConfig,
    path: Path,
) -> dict[str, GgufLocation]:
    """Return the location of every tensor of the model by name; `parts` is the result of `tensor_parts`."""
    shapes = expected_shapes(config)
    locations = _latent_locations(parts)
    for stored, part_names in parts.items():
        if part_names[0].endswith((_KEYS, _VALUES)):
            continue
        if len(part_names) == 1 and len(tensors[stored].shape) < 3:
            locations[part_names[0]] = GgufLocation(stored)
            continue
        start = 0
        for name in part_names:
            shape = shapes.get(name, (0, 0))
            end = start + (shape[0] if len(shape) > 1 else 1)
            locations[name] = GgufLocation(stored, (start, end))
            start = end
        if start != stored_rows(tensors[stored]):
            raise CheckpointError(
                f"{path}: tensor {stored!r} has {stored_rows(tensors[stored])} rows, its config says {start}; "
                "get the file again"
            )
    return {name: _ordered(name, location, names, config) for name, location in locations.items()}


def stored_rows(tensor: GgufTensor) -> int:
    """Return the number of rows, with all outer dimensions flattened."""
    return tensor.nbytes // tensor.row_bytes


def module_tensors(tensors: Iterable[str], layers: range) -> list[str]:
    """Return the stored names of the tensors in these layers."""
    return [name for name in tensors if (layer := _LAYER.match(name)) and int(layer[1]) in layers]


def _latent_locations(parts: Mapping[str, list[str]]) -> dict[str, GgufLocation]:
    """Return the locations of matrices that expand latent rows, if the file stores them as two tensors."""
    stored_names = {part_names[0]: stored for stored, part_names in parts.items()}
    layers = [name.removesuffix(_KEYS) for name in stored_names if name.endswith(_KEYS)]
    return {
        layer + _BOTH: GgufLocation(stored_names[layer + _KEYS], values=stored_names[layer + _VALUES])
        for layer in layers
        if layer + _VALUES in stored_names
    }


def _ordered(name: str, location: GgufLocation, names: GgufNames, config: ModelConfig) -> GgufLocation:
    """Return the location with the order in which the file stores rows and columns."""
    if names.interleaved and (
        rotated := rotated_rows(config.layers[0].attention).get(name.split(".", 3)[-1])
    ):
        return replace(location, order=rotated)
    spec, part = config.recurrent, name.rpartition(_RECURRENT)[2]
    if spec is None or _RECURRENT not in name:
        return location
    if names.grouped_by_key and location.rows is not None:
        return replace(location, rows=None, order=grouped_rows(spec, part.removesuffix(".weight")))
    if names.tiled_values and spec.heads != spec.key_heads:
        return replace(location, order=tiled_rows(spec).get(part), columns=tiled_columns(spec).get(part))
    return location


def _canonical(name: str) -> str:
    """Return the canonical form of a mapped name, without the suffixes that only GGUF has."""
    return (
        name.replace("e_score_correction.bias", "e_score_correction_bias")
        .replace("self_attn.sinks.weight", "self_attn.sinks")
        .replace("linear_attn.dt.bias", "linear_attn.dt_bias")
    )


def _parts(stored: str, tensor: GgufTensor, names: GgufNames, path: Path) -> list[str]:
    """Return the names of the model's tensors in a stored tensor, in the order of its rows."""
    stem, _, suffix = stored.rpartition(".")
    if suffix == "weight" and stem in TOP_TENSORS:
        return [f"{TOP_TENSORS[stem]}.weight"]
    bare = _BARE_TENSOR.fullmatch(stored)
    if bare is not None and bare[2] in names.layer_tensors:
        return [f"model.layers.{bare[1]}.{names.layer_tensors[bare[2]]}"]
    match = _LAYER_TENSOR.fullmatch(stored)
    if match is not None:
        layer, name, suffix = match.groups()
        prefix = f"model.layers.{layer}."
        dimensions = 2 if suffix == "bias" else 3
        if name in _ALL_EXPERTS and len(tensor.shape) == dimensions and tensor.shape[0] <= _MOST_EXPERTS:
            return [
                f"{prefix}mlp.experts.{expert}.{part}.{suffix}"
                for expert in range(tensor.shape[0])
                for part in _ALL_EXPERTS[name]
            ]
        parts = names.fused.get(name, (name,))
        if all(part in names.layer_tensors for part in parts):
            return [_canonical(f"{prefix}{names.layer_tensors[part]}.{suffix}") for part in parts]
    raise CheckpointError(f"{path}: tensor {stored!r} belongs to no supported model; use another model")
