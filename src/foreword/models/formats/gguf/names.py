"""GGUF's tensors by their names here: renamed, or cut out of those that hold several."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import TOP_TENSORS, GgufNames
from foreword.models.config import ModelConfig
from foreword.models.formats.gguf.file import GgufTensor
from foreword.models.layer_shapes import expected_shapes

_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(\w+)\.(weight|bias)")
_ALL_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MOST_EXPERTS = 1 << 16


@dataclass(frozen=True)
class GgufPlace:
    """Where a tensor is."""

    stored: str
    rows: tuple[int, int] | None = None  # of the stored ones, all outer dimensions taken together; None: all


def tensor_parts(
    tensors: Mapping[str, GgufTensor], names: GgufNames, path: Path, skipped: Iterable[str]
) -> dict[str, list[str]]:
    """Stored name -> names here of what it holds, in order."""
    ignored = set(skipped)
    return {
        stored: _parts(stored, tensor, names, path)
        for stored, tensor in tensors.items()
        if stored not in ignored
    }


def places(
    parts: Mapping[str, list[str]], tensors: Mapping[str, GgufTensor], config: ModelConfig, path: Path
) -> dict[str, GgufPlace]:
    """Where every tensor of the model is."""
    shapes = expected_shapes(config)
    found: dict[str, GgufPlace] = {}
    for stored, held in parts.items():
        if len(held) == 1 and len(tensors[stored].shape) < 3:
            found[held[0]] = GgufPlace(stored)
            continue
        start = 0
        for name in held:
            end = start + shapes.get(name, (0,))[0]
            found[name] = GgufPlace(stored, (start, end))
            start = end
        if start != _rows(tensors[stored]):
            raise CheckpointError(
                f"{path}: tensor {stored!r} has {_rows(tensors[stored])} rows, its config says {start}; "
                "get the file again"
            )
    return found


def _rows(tensor: GgufTensor) -> int:
    return tensor.nbytes // tensor.row_bytes


def _parts(stored: str, tensor: GgufTensor, names: GgufNames, path: Path) -> list[str]:
    stem, _, suffix = stored.rpartition(".")
    if suffix == "weight" and stem in TOP_TENSORS:
        return [f"{TOP_TENSORS[stem]}.weight"]
    match = _LAYER_TENSOR.fullmatch(stored)
    if match is not None:
        layer, name, kind = match.groups()
        prefix = f"model.layers.{layer}."
        if name in _ALL_EXPERTS and len(tensor.shape) == 3 and tensor.shape[0] <= _MOST_EXPERTS:
            return [
                f"{prefix}mlp.experts.{expert}.{_ALL_EXPERTS[name]}.{kind}"
                for expert in range(tensor.shape[0])
            ]
        held = names.fused.get(name, (name,))
        if all(part in names.layer_tensors for part in held):
            return [f"{prefix}{names.layer_tensors[part]}.{kind}" for part in held]
    raise CheckpointError(f"{path}: tensor {stored!r} belongs to no supported model; use another")
