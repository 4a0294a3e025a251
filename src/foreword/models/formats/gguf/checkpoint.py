"""A GGUF file as a checkpoint, with Hugging Face's names and row order."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.native import native_status
from foreword.models.architectures.architecture import TOP_TENSORS, GgufNames
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import (
    LocatedTensors,
    QuantizedTensor,
    TensorPart,
    rotated_rows,
    row_pieces,
)
from foreword.models.formats.fields import GGUF_KEYS, ConfigFields, sampling_values
from foreword.models.formats.gguf.config import ROPE_TENSORS, gguf_config, gguf_family, module_layers
from foreword.models.formats.gguf.file import GgufFile, GgufTensor
from foreword.models.formats.gguf.tokenizer import TOKENIZER_PREFIX, gguf_tokenizer
from foreword.models.layer_shapes import expected_shapes
from foreword.models.tokenization.tokenizer import Tokenizer

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,8})\.")
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(\w+(?:\.\w+)?)\.(weight|bias)")
_ALL_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
_MOST_EXPERTS = 1 << 16
_KEYS, _VALUES, _BOTH = (f"self_attn.{name}_proj.weight" for name in ("k_b", "v_b", "kv_b"))


@dataclass(frozen=True)
class GgufLocation:
    """Location of a tensor."""

    stored: str
    rows: tuple[int, int] | None = None  # range of stored rows, outer dimensions flattened; None: all
    values: str | None = None  # second tensor, if the expansion of latent rows is stored in two parts


def tensor_parts(
    tensors: Mapping[str, GgufTensor], names: GgufNames, path: Path, skipped: Iterable[str]
) -> dict[str, list[str]]:
    ignored = set(skipped)
    return {
        stored: _parts(stored, tensor, names, path)
        for stored, tensor in tensors.items()
        if stored not in ignored
    }


def places(
    parts: Mapping[str, list[str]], tensors: Mapping[str, GgufTensor], config: ModelConfig, path: Path
) -> dict[str, GgufLocation]:
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
        if start != _rows(tensors[stored]):
            raise CheckpointError(
                f"{path}: tensor {stored!r} has {_rows(tensors[stored])} rows, its config says {start}; "
                "get the file again"
            )
    return found


def _latent_places(parts: Mapping[str, list[str]]) -> dict[str, GgufLocation]:
    """Return the locations of latent expansions that are stored in two parts."""
    single = {held[0]: stored for stored, held in parts.items()}
    layers = [name.removesuffix(_KEYS) for name in single if name.endswith(_KEYS)]
    return {
        layer + _BOTH: GgufLocation(single[layer + _KEYS], values=single[layer + _VALUES])
        for layer in layers
        if layer + _VALUES in single
    }


def module_tensors(tensors: Iterable[str], layers: range) -> list[str]:
    return [name for name in tensors if (layer := _LAYER.match(name)) and int(layer[1]) in layers]


def _canonical(name: str) -> str:
    """Return a name without the suffix that GGUF adds to tensors that are neither matrices nor biases."""
    return name.replace("e_score_correction.bias", "e_score_correction_bias").replace(
        "self_attn.sinks.weight", "self_attn.sinks"
    )


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


_UNQUANTIZED = ("F32", "F16", "BF16")
_CHUNK_ELEMENTS = 2**19  # dequantised at once by each thread, which bounds the extra memory
_THREADS = min(8, os.cpu_count() or 1)


def dequantized(kind: str, rows: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Dequantise stored blocks of this kind, [rows, bytes], to [rows, columns]."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    columns = rows.shape[1] // size * numbers
    loaded = torch.empty((rows.shape[0], columns), dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // columns)

    def fill(start: int) -> None:
        loaded[start : start + step] = _floats(
            kind, np.ascontiguousarray(rows[start : start + step]), columns
        )

    with ThreadPoolExecutor(_THREADS) as pool:  # kernels and NumPy work without the interpreter's lock
        list(pool.map(fill, range(0, rows.shape[0], step)))
    return loaded


@cache
def _native_kinds() -> tuple[str, ...]:
    if not native_status().available:
        return ()
    from foreword.kernels import _native

    return tuple(_native.BLOCK_KINDS)


def _floats(kind: str, rows: NDArray[np.uint8], columns: int) -> Tensor:
    """Dequantise to float32 with the compiled kernels; without them, NumPy gives the same numbers more slowly."""
    if kind in _native_kinds():
        from foreword.kernels import _native

        floats = torch.empty((len(rows), columns))
        _native.dequantize(kind, rows, floats)
        return floats
    return torch.from_numpy(np.array(dequantize(rows, GGMLQuantizationType[kind]), np.float32))


class GgufCheckpoint(LocatedTensors[GgufLocation]):
    """One GGUF model file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        _, names = gguf_family(self._file)
        fields = ConfigFields(self._file.metadata, str(path), prefix=f"{names.architecture}.")
        modules = module_tensors(self._file.tensors, module_layers(fields))
        parts = tensor_parts(self._file.tensors, names, path, (*ROPE_TENSORS, *modules))
        self.config = gguf_config(self._file, frozenset(name for held in parts.values() for name in held))
        self._rotated = rotated_rows(self.config.layers[0].attention) if names.interleaved else {}
        self._places = places(parts, self._file.tensors, self.config, path)

    def weight_format(self) -> str:
        """Return the quantisation that the file's metadata names, such as Q4_K_M."""
        try:
            named = LlamaFileType(self._file.metadata.get("general.file_type", -1))
        except ValueError:
            return ""
        return named.name.removeprefix("ALL_").removeprefix("MOSTLY_")

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        place = self._place(name)
        tensor = self._file.tensors[place.stored]
        if place.values is not None:
            return self._expanding(place.stored, place.values, dtype)
        loaded = dequantized(tensor.kind, self._rows(name), dtype)
        if name.endswith(".bias"):
            return loaded.reshape(-1)
        if name.endswith("conv1d.weight"):
            return loaded.unsqueeze(1)
        is_matrix = place.rows is not None or name.endswith("shared_expert_gate.weight")
        return loaded if is_matrix else loaded.reshape(tensor.shape)

    def load_part(self, name: str, dtype: torch.dtype, part: TensorPart) -> Tensor:
        place = self._place(name)
        tensor = self._file.tensors[place.stored]
        if place.values is not None or len(tensor.shape) < 2 or name.endswith(".bias"):
            return part.of(self.load(name, dtype)).clone()
        rows = self._rows(name)
        if part.rows is not None:
            rows = rows[slice(*part.rows)]
        if part.columns is None:
            return dequantized(tensor.kind, rows, dtype)
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]  # per block
        begin, end = part.columns
        first, last = begin // numbers, -(-end // numbers)
        loaded = dequantized(tensor.kind, rows[:, first * size : last * size], dtype)
        return loaded[:, begin - first * numbers : end - first * numbers].clone()

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        place = self._place(name)
        tensor = self._file.tensors[place.stored]
        if place.values is not None or (len(tensor.shape) != 2 and place.rows is None):
            yield from row_pieces(self.load(name, dtype), rows)
            return
        stored = self._rows(name)
        for start in range(0, len(stored), rows):
            yield dequantized(tensor.kind, stored[start : start + rows], dtype)

    def _expanding(self, keys: str, values: str, dtype: torch.dtype) -> Tensor:
        """Return the expansion of latent rows to keys and values of every head; keys are stored transposed."""
        stored = [self._file.tensors[name] for name in (keys, values)]
        shapes = [tensor.shape for tensor in stored]
        fit = all(len(shape) == 3 for shape in shapes) and shapes[0][:2] == (shapes[1][0], shapes[1][2])
        if not fit:
            raise CheckpointError(
                f"{self.path}: {keys} and {values} do not fit each other: {shapes}; get the file again"
            )
        parts = [
            dequantized(tensor.kind, self._file.rows(tensor.name), dtype).view(tensor.shape)
            for tensor in stored
        ]
        return torch.cat((parts[0].transpose(1, 2), parts[1]), dim=1).flatten(0, 1)

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Return the tensor's blocks in Hugging Face's row order, copied only if the order differs."""
        place = self._place(name)
        tensor = self._file.tensors[place.stored]
        if (
            tensor.kind in _UNQUANTIZED
            or place.values is not None
            or (len(tensor.shape) != 2 and place.rows is None)
        ):
            return None
        rows = self._rows(name)
        return QuantizedTensor(tensor.kind, rows, (len(rows), tensor.shape[-1]))

    def release(self) -> None:
        self._file.release()

    def sampling_defaults(self) -> dict[str, float]:
        return sampling_values(self._file.metadata, GGUF_KEYS, str(self.path))

    def _read_tokenizer(self) -> Tokenizer:
        tokenizer = gguf_tokenizer(self._file)
        self._file.drop_arrays(TOKENIZER_PREFIX)
        return tokenizer

    def _rows(self, name: str) -> NDArray[np.uint8]:
        """Return stored bytes [rows, bytes per row], rows of q and k in rotate-half order."""
        place = self._place(name)
        stored = self._file.rows(place.stored)
        if place.rows is not None:
            stored = stored[slice(*place.rows)]
        rotated = self._rotated.get(name.split(".", 3)[-1])
        if rotated is None:
            return stored
        tensor = self._file.tensors[place.stored]
        if tensor.shape[0] != rotated.rows:
            raise CheckpointError(
                f"{self.path}: {name} has {tensor.shape[0]} rows, not {rotated.rows // rotated.head} heads; "
                "get the file again"
            )
        rows = stored.reshape(tensor.shape[0], -1)  # a bias is stored as one row: [out, 4]
        return rows[rotated.order()].reshape(stored.shape)
