"""A safetensors file, opened; what cannot be read is told in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from foreword.errors import CheckpointError


@contextmanager
def opened_safetensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except SafetensorError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} is not a whole safetensors file ({reason}); get it again") from None
