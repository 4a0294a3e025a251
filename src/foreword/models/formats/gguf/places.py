"""Locations of a model's tensors in a GGUF file, by Hugging Face's names."""

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
_BARE_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(ssm_a|ssm_d)")
_ALL_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
_MOST_EXPERTS = 1 << 16
_KEYS, _VALUES, _BOTH = (f"self_attn.{name}_proj.weight" for name in ("k_b", "v_b", "kv_b"))
_RECURRENT = ".linear_attn."


@dataclass(frozen=True)
class GgufLocation:
    """Location of a tensor, and the order in which it is stored."""

    stored: str
    rows: tuple[int, int] | None = None  # range of stored rows, outer dimensions flattened; None: all
    values: str | None = None  # second tensor, if the expansion of latent rows is stored in two parts
    order: RotatedRows | GroupedRows | TiledHeads | None = None  # of rows, or of a vector's numbers
    columns: TiledHeads | None = None


def tensor_parts(
    tensors: Mapping[str, GgufTensor], names: GgufNames, path: Path, skipped: Iterable[str]
) -> dict[str, list[str]]:
    """Return the model's tensors that each stored one holds."""
    ignored = set(skipped)
    return {
        stored: _parts(stored, tensor, names, path)
        for stored, tensor in tensors.items()
        if stored not in ignored
    }


def places(
    parts: Mapping[str, list[str]],
    tensors: Mapping[str, GgufTensor],
    names: GgufNames,
    config: ModelConfig,
    path: Path,
) -> dict[str, GgufLocation]:
    """Return the location of every tensor by its name in the model."""
    shapes = expected_shapes(config)
    found = _latent_places(parts)
    for stored, held in parts.items():
        if held[0].endswith((_KEYS, _VALUES)):
            continue
        if len(held) == 1 and len(tensors[stored].shape) < 3:
            found[held[0]] = GgufLocation(stored)
            continue
        start = 0
        for name in held:
            shape = shapes.get(name, (0, 0))
            end = start + (shape[0] if len(shape) > 1 else 1)
            found[name] = GgufLocation(stored, (start, end))
            start = end
        if start != stored_rows(tensors[stored]):
            raise CheckpointError(
                f"{path}: tensor {stored!r} has {stored_rows(tensors[stored])} rows, its config says {start}; "
                "get the file again"
            )
    return {name: _ordered(name, place, names, config) for name, place in found.items()}


def stored_rows(tensor: GgufTensor) -> int:
    return tensor.nbytes // tensor.row_bytes


def module_tensors(tensors: Iterable[str], layers: range) -> list[str]:
    return [name for name in tensors if (layer := _LAYER.match(name)) and int(layer[1]) in layers]


def _latent_places(parts: Mapping[str, list[str]]) -> dict[str, GgufLocation]:
    """Return the locations of latent expansions that are stored in two parts."""
    single = {held[0]: stored for stored, held in parts.items()}
    layers = [name.removesuffix(_KEYS) for name in single if name.endswith(_KEYS)]
    return {
        layer + _BOTH: GgufLocation(single[layer + _KEYS], values=single[layer + _VALUES])
        for layer in layers
        if layer + _VALUES in single
    }


def _ordered(name: str, place: GgufLocation, names: GgufNames, config: ModelConfig) -> GgufLocation:
    """Add the order of rows and columns."""
    if names.interleaved and (
        rotated := rotated_rows(config.layers[0].attention).get(name.split(".", 3)[-1])
    ):
        return replace(place, order=rotated)
    spec, part = config.recurrent, name.rpartition(_RECURRENT)[2]
    if spec is None or _RECURRENT not in name:
        return place
    if names.grouped_by_key and place.rows is not None:
        return replace(place, rows=None, order=grouped_rows(spec, part.removesuffix(".weight")))
    if names.tiled_values and spec.heads != spec.key_heads:
        return replace(place, order=tiled_rows(spec).get(part), columns=tiled_columns(spec).get(part))
    return place


def _canonical(name: str) -> str:
    """Return a name without the suffix that GGUF adds to tensors that are neither matrices nor biases."""
    return (
        name.replace("e_score_correction.bias", "e_score_correction_bias")
        .replace("self_attn.sinks.weight", "self_attn.sinks")
        .replace("linear_attn.dt.bias", "linear_attn.dt_bias")
    )


def _parts(stored: str, tensor: GgufTensor, names: GgufNames, path: Path) -> list[str]:
    stem, _, suffix = stored.rpartition(".")
    if suffix == "weight" and stem in TOP_TENSORS:
        return [f"{TOP_TENSORS[stem]}.weight"]
    bare = _BARE_TENSOR.fullmatch(stored)
    if bare is not None and bare[2] in names.layer_tensors:
        return [f"model.layers.{bare[1]}.{names.layer_tensors[bare[2]]}"]
    match = _LAYER_TENSOR.fullmatch(stored)
    if match is not None:
        layer, name, kind = match.groups()
        prefix = f"model.layers.{layer}."
        dimensions = 2 if kind == "bias" else 3
        if name in _ALL_EXPERTS and len(tensor.shape) == dimensions and tensor.shape[0] <= _MOST_EXPERTS:
            return [
                f"{prefix}mlp.experts.{expert}.{part}.{kind}"
                for expert in range(tensor.shape[0])
                for part in _ALL_EXPERTS[name]
            ]
        held = names.fused.get(name, (name,))
        if all(part in names.layer_tensors for part in held):
            return [_canonical(f"{prefix}{names.layer_tensors[part]}.{kind}") for part in held]
    raise CheckpointError(f"{path}: tensor {stored!r} belongs to no supported model; use another")
