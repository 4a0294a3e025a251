"""A Hugging Face directory with some of another one's layers."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from foreword.models.formats.hf.checkpoint import HfCheckpoint, read_json_object
from foreword.progress import Progress

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
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
    """Write config, weights (as they are stored, in one file) and the tokenizer. Holds the weights in memory."""
    out.mkdir()
    settings = read_json_object(source.path / "config.json") | {"num_hidden_layers": len(layers)}
    if isinstance(kinds := settings.get(_PER_LAYER_SETTING), list):
        settings[_PER_LAYER_SETTING] = [kinds[layer] for layer in layers]
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for name in _COPIED_FILES:
        if (source.path / name).exists():
            shutil.copyfile(source.path / name, out / name)
    save_file(_kept_tensors(source, layers, progress), out / "model.safetensors", {"format": "pt"})


def _kept_tensors(
    source: HfCheckpoint, layers: Sequence[int], progress: Progress | None
) -> dict[str, Tensor]:
    numbers = {layer: number for number, layer in enumerate(layers)}
    new_names: dict[str, str] = {}
    for name in sorted(source.tensor_names()):
        match = _LAYER.fullmatch(name)
        if match is None:
            new_names[name] = name
        elif int(match[1]) in numbers:
            new_names[name] = f"model.layers.{numbers[int(match[1])]}.{match[2]}"
    kept: dict[str, Tensor] = {}
    for done, (name, new_name) in enumerate(new_names.items(), start=1):
        kept[new_name] = source.stored(name)
        if progress is not None:
            progress(done, len(new_names))
    return kept
