"""Heads from other layouts, pickled ones too: the only place where a pickle is read, and by torch's safe reader."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.heads.files import PICKLES
from foreword.models.heads.opening import open_head
from foreword.models.heads.writing import stored_tensors, write_head


def convert_head(path: Path, out: Path) -> int:
    """Write a head in speculators' layout into a new directory; returns its size in bytes."""
    pickles = _pickles(path)
    if not pickles:
        head = open_head(path)
        return write_head(head, out, stored_tensors(head))
    with TemporaryDirectory() as folder:
        plain = Path(folder)
        save_file(_unpickled(pickles), plain / "model.safetensors", {"format": "pt"})
        config = (path if path.is_dir() else path.parent) / "config.json"
        if not config.exists():
            raise CheckpointError(f"{config} is missing; get the whole head")
        shutil.copyfile(config, plain / "config.json")
        head = open_head(plain)
        return write_head(head, out, stored_tensors(head))


def _pickles(path: Path) -> list[Path]:
    """The pickled files of a head that has no others."""
    if path.is_file():
        return [path] if any(path.match(pattern) for pattern in PICKLES) else []
    if any(path.glob("*.safetensors")):
        return []
    return sorted(file for pattern in PICKLES for file in path.glob(pattern))


def _unpickled(files: list[Path]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for what is damaged or would run code
            reason = " ".join(str(error).split())[:120]
            raise CheckpointError(f"{file} holds more than tensors, or is damaged: {reason}") from None
        if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
            raise CheckpointError(f"{file} holds no plain set of tensors; get the head again")
        found |= {str(name): tensor.contiguous().clone() for name, tensor in content.items()}
    return found
