"""GGUF files whose metadata or tensors a test has changed after they were read."""

from collections.abc import Callable
from copy import copy
from functools import lru_cache
from pathlib import Path

import pytest

from foreword.models.formats.gguf import checkpoint as reading
from foreword.models.formats.gguf.checkpoint import GgufCheckpoint
from foreword.models.formats.gguf.file import GgufFile


def opened(monkeypatch: pytest.MonkeyPatch, path: Path, change: Callable[[GgufFile], None]) -> GgufCheckpoint:
    """The file after `change` was done to what was read of it."""

    def changed(path: Path) -> GgufFile:
        file = copy(_read(path))
        file.metadata, file.tensors = dict(file.metadata), dict(file.tensors)
        change(file)
        return file

    monkeypatch.setattr(reading, "GgufFile", changed)
    return GgufCheckpoint(path)


@lru_cache(16)
def _read(path: Path) -> GgufFile:
    """Tests try many changes of few files, and reading takes longer than most of these."""
    return GgufFile(path)
