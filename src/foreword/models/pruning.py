"""Writes a model with fewer layers, for use as a draft model."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from foreword.progress import Progress

_RANGE = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", re.ASCII)


def parse_layers(text: str) -> list[int]:
    """Parse layer numbers and inclusive ranges: `0-9,20,25-29`."""
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
    return [(2 * place * (config.num_layers - 1) + steps) // (2 * steps) for place in range(count)]


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
_WRITTEN_BY_WRITER = ("general.architecture", "GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
_ALIGNMENT = "general.alignment"


def write_pruned_gguf(
    model: Path, out: Path, layers: Sequence[int], progress: Progress | None = None
) -> None:
    """Write these layers renumbered, with everything else in the file."""
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
            if progress is not None:
                progress(done, len(kept))
    finally:
        writer.close()


def _renumbered(names: Iterable[str], number: re.Pattern[str], layers: Sequence[int]) -> dict[str, str]:
    """Return name -> new name of the tensors of these layers and of those outside the layers.

    The first group of `number` is the layer's number in a name.
    """
    numbers = {str(layer): str(new) for new, layer in enumerate(layers)}
    found = {}
    for name in names:
        match = number.match(name)
        if match is None:
            found[name] = name
        elif match[1] in numbers:
            found[name] = f"{name[: match.start(1)]}{numbers[match[1]]}{name[match.end(1) :]}"
    return found


def _copy_metadata(writer: gguf.GGUFWriter, model: Path, layers: Sequence[int]) -> None:
    """Copy all entries with their types; adapt layer counts and per-layer lists."""
    fields = gguf.GGUFReader(model).fields
    prefix = f"{writer.arch}."
    num_layers = fields[f"{prefix}block_count"].contents()
    for key, field in fields.items():
        kind, *element_kinds = field.types
        # The writer has no empty arrays; readers treat missing ones the same.
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
    source: HfCheckpoint, out: Path, layers: Sequence[int], progress: Progress | None = None
) -> None:
    """Write config, weights (as stored, in one file) and tokenizer. Holds the weights in memory."""
    out.mkdir()
    settings = read_json_object(source.path / "config.json") | {"num_hidden_layers": len(layers)}
    if isinstance(kinds := settings.get(_PER_LAYER_SETTING), list):
        settings[_PER_LAYER_SETTING] = [kinds[layer] for layer in layers]
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for name in _COPIED_FILES:
        if (source.path / name).exists():
            shutil.copyfile(source.path / name, out / name)
    save_file(_kept_hf_tensors(source, layers, progress), out / "model.safetensors", {"format": "pt"})


def _kept_hf_tensors(
    source: HfCheckpoint, layers: Sequence[int], progress: Progress | None
) -> dict[str, Tensor]:
    new_names = _renumbered(sorted(source.tensor_names()), _LAYER, layers)
    kept: dict[str, Tensor] = {}
    for done, (name, new_name) in enumerate(new_names.items(), start=1):
        kept[new_name] = source.stored(name)
        if progress is not None:
            progress(done, len(new_names))
    return kept


def prune(
    model: Path, out: Path, layers: Sequence[int] | int, progress: Progress | None = None
) -> tuple[int, ...]:
    """Write `model` with these layers, or this many evenly spaced ones, to `out`; return their numbers.

    The format and the number formats stay. On failure, nothing is left at `out`.
    """
    source = open_checkpoint(model)
    kept = spread_layers(source.config, layers) if isinstance(layers, int) else layers
    check_layers_of(source.config, kept)
    _check_output(model, out)
    source.tokenizer()  # refuse an unreadable tokenizer before writing
    with _unfinished(out) as unfinished:
        if isinstance(source, HfCheckpoint):
            write_pruned_directory(source, unfinished, kept, progress)
        else:
            write_pruned_gguf(model, unfinished, kept, progress)
    open_checkpoint(out)  # check the result
    return tuple(kept)


def _check_output(model: Path, out: Path) -> None:
    """Raise `RequestError` for an existing output or a name of the wrong format."""
    is_named_gguf = out.suffix.lower() == ".gguf"
    if model.is_file() and not is_named_gguf:
        raise RequestError(f"{model} is a GGUF file, so the output must be one too: name it {out}.gguf")
    if model.is_dir() and is_named_gguf:
        raise RequestError(f"{model} is a directory, so the output must be one too, not {out}")
    if os.path.lexists(out):
        raise RequestError(f"{out} exists already; remove it or name another output")


@contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    """Yield a temporary path next to `out`, renamed at the end."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise _unwritable(out, error) from None
    try:
        yield workplace / out.name
        (workplace / out.name).rename(out)
    except OSError as error:
        raise _unwritable(out, error) from None
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _unwritable(out: Path, error: OSError) -> RequestError:
    return RequestError(f"{out} cannot be written: {error.strerror or error}")
