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

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,8})\.")
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(\w+)\.(weight|bias)")
_ALL_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
_MOST_EXPERTS = 1 << 16
_KEYS, _VALUES, _BOTH = (f"self_attn.{name}_proj.weight" for name in ("k_b", "v_b", "kv_b"))


@dataclass(frozen=True)
class GgufPlace:
    """Where a tensor is."""

    stored: str
    rows: tuple[int, int] | None = None  # of the stored ones, all outer dimensions taken together; None: all
    values: str | None = None  # what expands latent rows to values, where `stored` expands them to keys alone


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
    found = _latent_places(parts)
    for stored, held in parts.items():
        if held[0].endswith((_KEYS, _VALUES)):
            continue
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


def _latent_places(parts: Mapping[str, list[str]]) -> dict[str, GgufPlace]:
    """What expands latent rows, of both its parts."""
    single = {held[0]: stored for stored, held in parts.items()}
    layers = [name.removesuffix(_KEYS) for name in single if name.endswith(_KEYS)]
    return {
        layer + _BOTH: GgufPlace(single[layer + _KEYS], values=single[layer + _VALUES])
        for layer in layers
        if layer + _VALUES in single
    }


def module_tensors(tensors: Iterable[str], layers: range) -> list[str]:
    """Those of layers that are modules which guess ahead."""
    return [name for name in tensors if (layer := _LAYER.match(name)) and int(layer[1]) in layers]


def _canonical(name: str) -> str:
    return name.replace("e_score_correction.bias", "e_score_correction_bias")


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
                f"{prefix}mlp.experts.{expert}.{part}.{kind}"
                for expert in range(tensor.shape[0])
                for part in _ALL_EXPERTS[name]
            ]
        held = names.fused.get(name, (name,))
        if all(part in names.layer_tensors for part in held):
            return [_canonical(f"{prefix}{names.layer_tensors[part]}.{kind}") for part in held]
    raise CheckpointError(f"{path}: tensor {stored!r} belongs to no supported model; use another")
