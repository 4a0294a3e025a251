"""Writes a model with fewer layers, for use as a draft model."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from safetensors.torch import save_file
from torch import Tensor

from foreword.errors import CheckpointError, RequestError
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.formats.gguf.file import GgufFile
from foreword.models.formats.hf.checkpoint import HfCheckpoint, read_json_object
from foreword.models.unfinished import unfinished
from foreword.progress import Progress

_RANGE = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", re.ASCII)


def parse_layers(text: str) -> list[int]:
    """Return the layer indices that a text names with numbers and inclusive ranges: `0-9,20,25-29`."""
    layers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if last < first:
            raise RequestError(f"layers are numbers and ranges such as 0-9,20-29, not {part.strip()!r}")
        layers.extend(range(first, last + 1))
    return layers


def spread_layers(config: ModelConfig, count: int) -> list[int]:
    """Return `count` evenly spaced layers, including the first and, if several, the last."""
    if not 1 <= count <= config.num_layers:
        raise RequestError(f"from 1 to {config.num_layers} layers of this model can be kept, not {count}")
    steps = max(1, count - 1)
    # The integer nearest to index * (num_layers - 1) / steps.
    return [(2 * index * (config.num_layers - 1) + steps) // (2 * steps) for index in range(count)]


def check_layers_of(config: ModelConfig, layers: Sequence[int]) -> None:
    """Raise `RequestError` for layers that do not exist, repeat or are out of order."""
    if not layers:
        raise RequestError("at least one layer must be kept")
    outside = [layer for layer in layers if not 0 <= layer < config.num_layers]
    if outside:
        raise RequestError(
            f"there is no layer {outside[0]}: the model has {config.num_layers}, 0 to {config.num_layers - 1}"
        )
    if any(later <= earlier for earlier, later in pairwise(layers)):
        raise RequestError("layers must be named once each, in ascending order")


_BLOCK = re.compile(r"blk\.(\d+)\.")
# Metadata keys that `GGUFWriter` writes itself.
_WRITTEN_BY_WRITER = ("general.architecture", "GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
_ALIGNMENT = "general.alignment"


def write_pruned_gguf(model: Path, out: Path, layers: Sequence[int], progress: Progress) -> None:
    """Write a GGUF file with only these layers, renumbered; all other tensors and metadata are copied."""
    file = GgufFile(model)
    writer = gguf.GGUFWriter(out, file.metadata["general.architecture"])
    _copy_metadata(writer, model, layers)
    kept = [(new, file.tensors[name]) for name, new in _renumbered(file.tensors, _BLOCK, layers).items()]
    for name, tensor in kept:
        stored_shape = (*tensor.shape[:-1], tensor.row_bytes)
        kind = GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(name, stored_shape, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (_, tensor) in enumerate(kept, start=1):
            writer.write_tensor_data(file.rows(tensor.name))
            progress(done, len(kept))
    finally:
        writer.close()


def _renumbered(names: Iterable[str], pattern: re.Pattern[str], layers: Sequence[int]) -> dict[str, str]:
    """Return name -> new name, without the tensors of other layers; group 1 of `pattern` is the layer index."""
    new_indices = {str(layer): str(new) for new, layer in enumerate(layers)}
    new_names = {}
    for name in names:
        match = pattern.match(name)
        if match is None:
            new_names[name] = name
        elif match[1] in new_indices:
            new_names[name] = f"{name[: match.start(1)]}{new_indices[match[1]]}{name[match.end(1) :]}"
    return new_names


def _copy_metadata(writer: gguf.GGUFWriter, model: Path, layers: Sequence[int]) -> None:
    """Copy all metadata with its types; adapt the number of layers, and lists with one value per layer."""
    fields = gguf.GGUFReader(model).fields
    prefix = f"{writer.arch}."
    num_layers = fields[f"{prefix}block_count"].contents()
    for key, field in fields.items():
        kind, *element_kinds = field.types
        # The writer cannot write empty arrays. Readers treat a missing array like an empty one.
        if key in _WRITTEN_BY_WRITER or (kind is GGUFValueType.ARRAY and not element_kinds):
            continue
        if GGUFValueType.ARRAY in element_kinds:
            raise CheckpointError(f"{model}: metadata {key} is an array of arrays; it cannot be copied")
        value = field.contents()
        if key == f"{prefix}block_count":
            value = len(layers)
        elif key.startswith(prefix) and isinstance(value, list) and len(value) == num_layers:
            value = [value[layer] for layer in layers]
        elif key == _ALIGNMENT:
            writer.data_alignment = value
        writer.add_key_value(key, value, kind, element_kinds[0] if element_kinds else None)


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PER_LAYER_SETTING = "layer_types"
_COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def write_pruned_directory(
    source: HfCheckpoint, out: Path, layers: Sequence[int], progress: Progress
) -> None:
    """Write a directory with only these layers, renumbered, and all weights in one file, in their stored dtype."""
    out.mkdir()
    settings = read_json_object(source.path / "config.json") | {"num_hidden_layers": len(layers)}
    if isinstance(kinds := settings.get(_PER_LAYER_SETTING), list):
        settings[_PER_LAYER_SETTING] = [kinds[layer] for layer in layers]
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for name in _COPIED_FILES:
        if (source.path / name).exists():
            shutil.copyfile(source.path / name, out / name)
    new_names = _renumbered(sorted(source.tensor_names()), _LAYER, layers)
    tensors: dict[str, Tensor] = {}
    for done, (name, new_name) in enumerate(new_names.items(), start=1):
        tensors[new_name] = source.stored(name)
        progress(done, len(new_names))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def prune(
    model: Path, out: Path, layers: Sequence[int] | int, progress: Progress | None = None
) -> tuple[int, ...]:
    """Write a copy of `model` with only these layers, or this many evenly spaced ones, to `out`; return their indices.

    The copy has the same file format and data types. If this fails, nothing is left at `out`.
    """
    source = open_checkpoint(model)
    kept = spread_layers(source.config, layers) if isinstance(layers, int) else layers
    check_layers_of(source.config, kept)
    _check_output(model, out)
    source.tokenizer()  # raises before anything is written if the tokenizer is unreadable
    report = progress or (lambda *_: None)
    with unfinished(out) as path:
        if isinstance(source, HfCheckpoint):
            write_pruned_directory(source, path, kept, report)
        else:
            write_pruned_gguf(model, path, kept, report)
    open_checkpoint(out)  # raises if the copy is unreadable
    return tuple(kept)


def _check_output(model: Path, out: Path) -> None:
    """Raise `RequestError` if the output exists, or if its name is of another format than the model."""
    is_named_gguf = out.suffix.lower() == ".gguf"
    if model.is_file() and not is_named_gguf:
        raise RequestError(f"{model} is a GGUF file, so the output must be one too: name it {out}.gguf")
    if model.is_dir() and is_named_gguf:
        raise RequestError(f"{model} is a directory, so the output must be one too, not {out}")
    if os.path.lexists(out):
        raise RequestError(f"{out} exists already; remove it or name another output")
