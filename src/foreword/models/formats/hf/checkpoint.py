"""Reads a Hugging Face directory: config.json, and safetensors in one file or in shards."""

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import ExpertStacks
from foreword.models.architectures.registry import text_settings
from foreword.models.formats.checkpoint import (
    FP8_BLOCK,
    WHOLE,
    Fp8Tensor,
    GroupedTensor,
    LocatedTensors,
    PackedTensor,
    QuantizedTensor,
    TensorPart,
    missing_tensor,
    opened_safetensors,
    row_pieces,
)
from foreword.models.formats.fields import HF_KEYS, ConfigFields, sampling_values
from foreword.models.formats.hf.config import hf_config, hf_family
from foreword.models.formats.hf.packed import Scheme, packed_matrices, packed_stacks, scheme_of, unpacked
from foreword.models.formats.hf.tensors import HfLocation, canonical_name, expert_locations, tensor_locations
from foreword.models.formats.hf.tokenizer import hf_tokenizer
from foreword.models.layer_shapes import expected_shapes
from foreword.models.tokenization.tokenizer import Tokenizer

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_PREFIXES = ("model.mtp_layers.", "model.mtp.", "mtp.", "medusa_head.", "medusa_heads.", "model.visual.")
"""Prefixes of tensors in MTP modules (MiMo, MiMo-V2, Qwen3-Next), Medusa-2 heads and image encoders."""


def without_draft_modules(files: Mapping[str, Path], settings: Mapping[str, Any]) -> dict[str, Path]:
    """Return tensor name -> file without the tensors of draft heads, MTP modules and image encoders.

    DeepSeek and GLM number MTP modules like layers, after the decoder's last layer.
    """
    layers, modules = settings.get("num_hidden_layers"), settings.get("num_nextn_predict_layers")
    module_layers = range(0)
    if isinstance(layers, int) and isinstance(modules, int):
        module_layers = range(layers, layers + modules)

    def is_module(name: str) -> bool:
        numbered = _LAYER.match(name)
        return name.startswith(_PREFIXES) or (numbered is not None and int(numbered[1]) in module_layers)

    return {name: file for name, file in files.items() if not is_module(name)}


_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_DERIVED_TENSOR = ".rotary_emb.inv_freq"  # stored in old checkpoints; computed here


class HfCheckpoint(LocatedTensors[HfLocation]):
    """A model in a directory. Tensors have canonical names, and are read on demand."""

    _warned = False  # whether the warning about dequantised weights was logged

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_lora(path)
        self._settings = text_settings(read_json_object(path / "config.json"))
        family = hf_family(self._settings, path / "config.json")
        self._files = without_draft_modules(_tensor_files(path), self._settings)
        self._scheme = scheme_of(ConfigFields(self._settings, str(path / "config.json")))
        self._parts = {
            canonical_name(name, family.stored): parts
            for name, parts in packed_matrices(self._files, self._scheme).items()
        }
        experts: dict[str, HfLocation] = {}
        if (layout := family.stored.stacked_experts) is not ExpertStacks.NONE:
            self._parts = packed_stacks(self._parts)
            experts = expert_locations(self._parts, layout, self._stack_shape)
        stacks = {location.stored for location in experts.values()}
        names = frozenset(self._parts) - stacks
        self.config = hf_config(self._settings, names | experts.keys(), path / "config.json")
        self._locations = tensor_locations(names, family, self.config) | experts
        if self.config.tied_embeddings:
            self._locations.pop("lm_head.weight", None)

    def weight_format(self) -> str:
        """Return the packed format's name, or the data type that config.json names, such as BF16."""
        if self._scheme is not None:
            return self._scheme.title
        named = str(self._settings.get("dtype") or self._settings.get("torch_dtype") or "")
        return named.replace("bfloat", "BF").replace("float", "F")

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        location = self._location(name)
        return location.read(self._whole(location)).to(dtype, copy=True)

    def load_part(self, name: str, dtype: torch.dtype, part: TensorPart) -> Tensor:
        """Load a part in `dtype`. A tensor that is packed, reordered or in a stack of experts is read completely."""
        location = self._location(name)
        if (
            location.expert is not None
            or location.grouped is not None
            or not self._is_one_tensor(location.stored)
        ):
            return part.of(self.load(name, dtype)).clone()
        if part.rows is not None:
            location = location.narrowed(part.rows)
        cut = self._read(location.stored, TensorPart(location.rows, part.columns))
        return replace(location, rows=None).read(cut).to(dtype, copy=True)

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        """Yield pieces of a tensor, each read when it is needed; a transformed tensor is read completely."""
        location = self._location(name)
        if not location.is_plain or not self._is_one_tensor(location.stored):
            yield from row_pieces(self.load(name, dtype), rows)
            return
        with opened_safetensors(self._files[location.stored]) as file:
            shape = file.get_slice(location.stored).get_shape()
        if not shape:  # a scalar, in a damaged file
            yield from row_pieces(self.load(name, dtype), rows)
            return
        count = shape[0]
        for start in range(0, count, rows):
            yield self.load_part(name, dtype, TensorPart(rows=(start, min(start + rows, count))))

    def stored(self, name: str) -> Tensor:
        """Return a copy of the tensor in its stored dtype; raise if it is transformed when it is loaded."""
        if not self._location(name).is_plain or not self._is_one_tensor(name):
            raise CheckpointError(
                f"{self.path}: tensor {name} is not stored as it is used, and cannot be copied; use another model"
            )
        return self._read(name).clone()

    def _is_one_tensor(self, stored: str) -> bool:
        """Return whether a tensor is stored under its own name, instead of in parts of a packed format."""
        return self._parts[stored] == {"": stored}

    def _stack_shape(self, stack: str) -> list[int]:
        """Return the stored shape of a stack of experts."""
        stored = next(iter(self._parts[stack].values()))
        with opened_safetensors(self._files[stored]) as file:
            shape: list[int] = file.get_slice(stored).get_shape()
        return shape

    def _whole(self, location: HfLocation) -> Tensor:
        """Read and dequantise the stored tensor of a location; of a stack, only the expert: [out, in] or [out]."""
        parts = self._parts[location.stored]
        if "" in parts:
            if location.expert is None:
                return self._read(parts[""])
            tensor = self._read(parts[""], TensorPart((location.expert, location.expert + 1)))[0]
            return tensor.T if location.transposed and tensor.dim() > 1 else tensor
        if self._scheme is None:
            raise missing_tensor(location.stored, self.path)
        self._warn_once(self._scheme)
        return unpacked(self._scheme, self._packed(location), location.stored, self.path)

    def _packed(self, location: HfLocation) -> dict[str, Tensor]:
        """Return the parts of a packed matrix; of a stack, those of one expert."""
        parts = self._parts[location.stored].items()
        if location.expert is None:
            return {part: self._tensor(name) for part, name in parts}
        expert = TensorPart((location.expert, location.expert + 1))
        return {part: self._tensor(name, expert)[0].flatten(1) for part, name in parts}

    def is_packed(self, name: str) -> bool:
        """Return whether a matrix is stored as codes and scales."""
        return self._scheme is not None and "" not in self._parts[self._location(name).stored]

    def packed_tensor(self, name: str) -> PackedTensor | None:
        """Return a matrix in packed form; None if it is stored as plain floats or must be dequantised."""
        location = self._location(name)
        parts = self._parts[location.stored]
        if self._scheme is None or "" in parts or location.plus_one:
            return None
        packed = self._scheme.repack(self._packed(location))
        if packed is None or location.is_plain:
            return packed
        if isinstance(packed, GroupedTensor):
            return packed.rows(location.read)
        if not packed.in_blocks:
            return Fp8Tensor(location.read(packed.values), location.read(packed.scales), False)
        # A block has one scale for all its rows: only ranges of whole blocks can be cut out, in their order.
        first, end = location.rows or (0, 0)
        is_reordered = location.rotated is not None or location.grouped is not None
        if is_reordered or first % FP8_BLOCK or end % FP8_BLOCK:
            return None
        blocks = slice(first // FP8_BLOCK, end // FP8_BLOCK)
        return Fp8Tensor(location.read(packed.values), packed.scales[blocks], True)

    def _warn_once(self, scheme: Scheme) -> None:
        if self._warned:
            return
        self._warned = True
        stored = sum(file.stat().st_size for file in set(self._files.values()))
        numbers = sum(math.prod(shape) for shape in expected_shapes(self.config).values())
        logging.getLogger("foreword").warning(
            "%s is stored as %s (%.1f GB) and unpacked while it is loaded: %.1f GB in bfloat16, %.1f GB in int8, "
            "and no faster than the unquantised model",
            self.path.name,
            scheme.title,
            stored / 1e9,
            2 * numbers / 1e9,
            numbers / 1e9,
        )

    def _tensor(self, stored: str, part: TensorPart = WHOLE) -> Tensor:
        with opened_safetensors(self._files[stored]) as file:
            tensor: Tensor = file.get_tensor(stored) if part == WHOLE else part.of(file.get_slice(stored))
        return tensor

    def _read(self, stored: str, part: TensorPart = WHOLE) -> Tensor:
        tensor = self._tensor(stored, part)
        if tensor.dtype not in _FLOAT_TYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{self._files[stored]}: tensor {stored} has type {dtype}, which is not supported; "
                "use a model in float32, float16 or bfloat16"
            )
        return tensor

    def quantized(self, name: str) -> QuantizedTensor | None:
        self._location(name)
        return None

    def release(self) -> None: ...

    def sampling_defaults(self) -> dict[str, float]:
        file = self.path / "generation_config.json"
        return sampling_values(read_json_object(file), HF_KEYS, str(file)) if file.exists() else {}

    def _read_tokenizer(self) -> Tokenizer:
        return hf_tokenizer(self.path, self._settings)


def read_json_object(path: Path, what: str = "a whole model") -> dict[str, Any]:
    """Read a JSON object from a directory that should contain `what`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; give a directory that holds {what}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not valid JSON; get the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object; get the file again")
    return value


def _refuse_lora(path: Path) -> None:
    if not (path / "config.json").exists() and (path / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path} holds a LoRA adapter, which is not a whole model; give the model that it is for, "
            "and the adapter beside it"
        )


def _tensor_files(path: Path) -> dict[str, Path]:
    """Return tensor name -> file for all safetensors of a directory."""
    if (path / _INDEX_FILE).exists():
        files = _indexed_files(path)
    elif (path / _SINGLE_FILE).exists():
        files = dict.fromkeys(_names_in(path / _SINGLE_FILE), path / _SINGLE_FILE)
    else:
        raise _no_weights(path)
    return {name: file for name, file in files.items() if not name.endswith(_DERIVED_TENSOR)}


def _indexed_files(path: Path) -> dict[str, Path]:
    index = path / _INDEX_FILE
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(shard) for shard in weight_map.values()):
        raise CheckpointError(f"{index} does not map tensors to files beside it; get the file again")
    files: dict[str, Path] = {}
    for shard in sorted(set(weight_map.values())):
        if not (path / shard).exists():
            raise CheckpointError(f"{path / shard} is missing but named by {_INDEX_FILE}; get it again")
        files |= dict.fromkeys(_names_in(path / shard), path / shard)
    absent = sorted(set(weight_map) - set(files))
    if absent:
        raise missing_tensor(absent[0], path)
    return files


def _is_file_name(shard: object) -> bool:
    return isinstance(shard, str) and Path(shard).name == shard and shard.endswith(".safetensors")


def _names_in(file: Path) -> list[str]:
    with opened_safetensors(file) as tensors:
        return list(tensors.keys())


def _no_weights(path: Path) -> CheckpointError:
    if any(path.glob("*.safetensors")):
        return CheckpointError(
            f"{path} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; rename its safetensors file to {_SINGLE_FILE}"
        )
    if any(path.glob("*.gguf")):
        return CheckpointError(f"{path} is a directory of GGUF files; give the path of one of them")
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        return CheckpointError(
            f"{path} holds only pickled weights, which can run code and are never loaded; use safetensors"
        )
    return CheckpointError(f"{path} holds no {_SINGLE_FILE}; give a directory that holds a whole model")
