"""Files that are whole or not there, and room for them."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foreword.errors import RequestError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name to write to. The file gets its own name when it is whole; otherwise nothing is left of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    try:
        yield partial
        partial.replace(path)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # torch and safetensors have errors of their own
        reason = " ".join(str(error).split())
        raise RequestError(
            f"{path} cannot be written ({reason}); make room or choose another directory"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file; the same bytes whenever the same is written."""
    with written_whole(path) as partial:
        save_file(dict(tensors), partial, dict(metadata))
        _sort_metadata(partial)


def _sort_metadata(path: Path) -> None:
    """The library writes metadata in the order of a hash table, which is another one with every call."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size  # the same text in another order
        file.seek(8)
        file.write(text.ljust(size))


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """A file that `torch.load` reads with weights alone."""
    with written_whole(path) as partial:
        torch.save(dict(state), partial)


def write_text(path: Path, text: str) -> None:
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def require_directory(path: Path) -> None:
    """Refuse what is no directory and cannot become one, before there is something to write into it."""
    place = _nearest(path)
    if not place.is_dir():
        raise RequestError(f"{path} cannot be a directory: {place} is a file; give another path")
    if not os.access(place, os.W_OK | os.X_OK):
        raise RequestError(f"{path} cannot be written to: {place} is not yours to write; give another path")


def require_space(directory: Path, size: int, what: str) -> None:
    """Refuse to begin what the disk has no room for."""
    free = shutil.disk_usage(_nearest(directory)).free
    if free < size:
        raise RequestError(
            f"{what} may take {size / 1e6:,.0f} MB and the disk of {directory} has {free / 1e6:,.0f} MB free; "
            "make room or choose another directory"
        )


def _nearest(path: Path) -> Path:
    """The path, or the first above it that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
