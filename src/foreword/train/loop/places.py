"""Directories that a run may write to: nothing that is not its own is replaced."""

import re
from pathlib import Path

from foreword.errors import RequestError
from foreword.models.heads.describe import trained_kind
from foreword.train.files import require_directory

WEIGHTS = "model.safetensors"
MANIFEST = "pieces.json"
TEXTS, TRAINING = "texts", "training"
"""What a run keeps beside what was trained: texts that it wrote first, states and measurements."""


def state_in(out: Path) -> Path:
    """The newest state of the training in a directory."""
    return out / TRAINING / "state.pt"


def require_own(out: Path, *, resume: bool) -> None:
    """Refuse to train into a directory with files of others, over a training, or on from none."""
    require_directory(out)
    if resume and not state_in(out).exists():
        raise RequestError(f"{out} holds no training to go on with; leave out --resume for a new one")
    if state_in(out).exists():
        if not resume:
            raise RequestError(
                f"{out} holds a training that can go on with --resume; choose another --out for a new one"
            )
    elif foreign := _names(out) - {TEXTS, TRAINING}:
        raise RequestError(f"{out} is not empty (it holds {min(foreign)}); give a new directory")


def require_pieces_alone(export: Path, trained: Path) -> None:
    """Refuse to write pieces among files of others, or over what they are made of."""
    require_directory(export)
    if export.resolve() == trained.resolve():
        raise RequestError(f"{export} is where the training itself goes; give pieces another directory")
    names = _names(export)
    if names and (MANIFEST not in names or any(not _is_piece(name) for name in names - {MANIFEST})):
        raise RequestError(f"{export} holds more than pieces of an earlier export; give a new directory")


def require_new(out: Path) -> None:
    """Refuse a directory with anything in it."""
    require_directory(out)
    if _names(out):
        raise RequestError(f"{out} is not empty; give a new directory")


def require_same_kind(begin: Path, method: str) -> None:
    """Refuse to begin with weights of another kind of drafter."""
    kind = trained_kind(begin)
    if kind != method:
        found = "no trained weights" if kind is None else f"weights of kind {kind}"
        raise RequestError(
            f"--begin {begin} holds {found}; train {method} needs a directory of kind {method}"
        )


def _is_piece(name: str) -> bool:
    return re.fullmatch(re.escape(WEIGHTS) + r"\.\d{2,}", name) is not None


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.exists() else set()
