"""Writes the files of a training run atomically, and checks the directories that it uses."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foreword.errors import RequestError
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.describe import trained_kind
from foreword.models.heads.shipped import NORMS, some_tokens


def identity_of(checkpoint: Checkpoint) -> str:
    """Return a digest of a model's sizes, some tokens and some norms; it is the same in every file format."""
    config, names = checkpoint.config, checkpoint.tensor_names()
    norms = [checkpoint.load(name, torch.float32).tolist() for name in NORMS if name in names]
    sample = {
        "sizes": [config.hidden_size, config.num_layers, config.vocab_size],
        "tokens": some_tokens(checkpoint.tokenizer()),
        "norms": [[round(number, 5) for number in norm] for norm in norms],
    }
    return hashlib.sha256(json.dumps(sample, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path. Rename it to `path` at the end of the block, or remove it after a failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    try:
        yield partial
        partial.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own errors
        reason = " ".join(str(error).split())
        raise RequestError(
            f"{path} cannot be written ({reason}); make room or choose another directory"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with reproducible bytes."""
    with atomic_path(path) as partial:
        save_file(dict(tensors), partial, dict(metadata))
        _sort_metadata(partial)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata, which the library writes in random order."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size  # same text, other order
        file.seek(8)
        file.write(text.ljust(size))


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Write a file that `torch.load` reads with weights_only."""
    with atomic_path(path) as partial:
        torch.save(dict(state), partial)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def require_directory(path: Path) -> None:
    """Raise `RequestError` for a path that cannot become a writable directory."""
    parent = _nearest(path)
    if not parent.is_dir():
        raise RequestError(f"{path} cannot be a directory: {parent} is a file; give another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RequestError(
            f"{path} cannot be written to: no permission to write to {parent}; give another path"
        )


def require_space(directory: Path, size: int, what: str) -> None:
    """Raise `RequestError` if the disk has too little space."""
    free = shutil.disk_usage(_nearest(directory)).free
    if free < size:
        raise RequestError(
            f"{what} may take {size / 1e6:,.0f} MB and the disk of {directory} has {free / 1e6:,.0f} MB free; "
            "make room or choose another directory"
        )


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.lexists(parent))


WEIGHTS = "model.safetensors"
MANIFEST = "pieces.json"
TEXTS, TRAINING = "texts", "training"
"""Subfolders of a run: for training texts, and for training states and evaluations."""


def state_in(out: Path) -> Path:
    """Return the path of the newest training state in a run's directory."""
    return out / TRAINING / "state.pt"


def require_run_directory(out: Path, *, resume: bool) -> None:
    """Raise `RequestError` unless a training run's directory is empty or, with `resume`, has a training state."""
    require_directory(out)
    if resume and not state_in(out).exists():
        raise RequestError(f"{out} has no training state to resume; leave out --resume for a new training")
    if state_in(out).exists():
        if not resume:
            raise RequestError(
                f"{out} has a training state; continue it with --resume, or choose another --out for a new training"
            )
    elif unknown := _names(out) - {TEXTS, TRAINING}:
        raise RequestError(f"{out} is not empty (it holds {min(unknown)}); give a new directory")


def require_export_directory(export: Path, trained: Path) -> None:
    """Raise `RequestError` unless an export directory is empty, or has only pieces of an earlier export."""
    require_directory(export)
    if export.resolve() == trained.resolve():
        raise RequestError(f"{export} is the directory of the training itself; give the pieces another one")
    names = _names(export)
    piece = re.escape(WEIGHTS) + r"\.\d{2,}"
    if names and (MANIFEST not in names or not all(re.fullmatch(piece, name) for name in names - {MANIFEST})):
        raise RequestError(
            f"{export} has files that are not pieces of an earlier export; give a new directory"
        )


def require_new(out: Path) -> None:
    """Raise `RequestError` for a directory that is not empty."""
    require_directory(out)
    if _names(out):
        raise RequestError(f"{out} is not empty; give a new directory")


def require_same_kind(begin: Path, method: str) -> None:
    """Raise `RequestError` for initial weights of another kind of drafter."""
    kind = trained_kind(begin)
    if kind != method:
        held = "no trained weights" if kind is None else f"weights of kind {kind}"
        raise RequestError(f"--begin {begin} holds {held}; train {method} needs a directory of kind {method}")


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.exists() else set()
