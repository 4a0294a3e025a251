"""Tensors in a model's files that are not the decoder's: modules that guess ahead for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PREFIXES = ("model.mtp_layers.", "model.mtp.", "mtp.", "medusa_head.", "medusa_heads.")
"""Of MTP modules (MiMo, MiMo-V2, Qwen3-Next), and of Medusa-2's heads."""


def without_draft_modules(files: Mapping[str, Path], settings: Mapping[str, Any]) -> dict[str, Path]:
    """The decoder's own tensors. DeepSeek's and GLM's modules are numbered like layers behind the last."""
    layers, modules = settings.get("num_hidden_layers"), settings.get("num_nextn_predict_layers")
    prefixes: tuple[str, ...] = _PREFIXES
    if isinstance(layers, int) and isinstance(modules, int):
        prefixes += tuple(f"model.layers.{layers + place}." for place in range(modules))
    return {name: file for name, file in files.items() if not name.startswith(prefixes)}
