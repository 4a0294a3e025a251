"""Tensors in a model's files that are not the decoder's: modules that guess ahead for it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_PREFIXES = ("model.mtp_layers.", "model.mtp.", "mtp.", "medusa_head.", "medusa_heads.")
"""Of MTP modules (MiMo, MiMo-V2, Qwen3-Next), and of Medusa-2's heads."""


def without_draft_modules(files: Mapping[str, Path], settings: Mapping[str, Any]) -> dict[str, Path]:
    """The decoder's own tensors. DeepSeek's and GLM's modules are numbered like layers behind the last."""
    layers, modules = settings.get("num_hidden_layers"), settings.get("num_nextn_predict_layers")
    behind = (
        range(layers, layers + modules) if isinstance(layers, int) and isinstance(modules, int) else range(0)
    )

    def is_module(name: str) -> bool:
        numbered = _LAYER.match(name)
        return name.startswith(_PREFIXES) or (numbered is not None and int(numbered[1]) in behind)

    return {name: file for name, file in files.items() if not is_module(name)}
