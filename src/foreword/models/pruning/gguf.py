"""A GGUF file with some of another one's blocks, copied byte for byte."""

import re
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType

from foreword.errors import CheckpointError
from foreword.models.formats.gguf.file import GgufFile, GgufTensor
from foreword.progress import Progress

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_WRITTEN_BY_WRITER = ("general.architecture", "GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
_ALIGNMENT = "general.alignment"


def write_pruned_gguf(
    model: Path, out: Path, layers: Sequence[int], progress: Progress | None = None
) -> None:
    """Write the blocks of these layers, numbered anew, with all else that the file holds."""
    file = GgufFile(model)
    writer = gguf.GGUFWriter(out, file.metadata["general.architecture"])
    _copy_metadata(writer, model, layers)
    kept = _kept_tensors(file, layers)
    for name, tensor in kept.items():
        stored_shape = (*tensor.shape[:-1], tensor.row_bytes)
        kind = GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(name, stored_shape, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, tensor in enumerate(kept.values(), start=1):
            writer.write_tensor_data(file.rows(tensor.name))
            if progress is not None:
                progress(done, len(kept))
    finally:
        writer.close()


def _kept_tensors(file: GgufFile, layers: Sequence[int]) -> dict[str, GgufTensor]:
    """Name in the new file -> tensor of the old one, in the old one's order."""
    numbers = {layer: number for number, layer in enumerate(layers)}
    kept: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        match = _BLOCK.fullmatch(name)
        if match is None:
            kept[name] = tensor
        elif int(match[1]) in numbers:
            kept[f"blk.{numbers[int(match[1])]}.{match[2]}"] = tensor
    return kept


def _copy_metadata(writer: gguf.GGUFWriter, model: Path, layers: Sequence[int]) -> None:
    """Every entry with its own type; what counts the blocks, or lists something for each, is adapted."""
    fields = gguf.GGUFReader(model).fields
    prefix = f"{writer.arch}."
    num_layers = fields[f"{prefix}block_count"].contents()
    for key, field in fields.items():
        kind, *element_kinds = field.types
        # The writer has no empty arrays; to every reader of GGUF a missing one is the same.
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
