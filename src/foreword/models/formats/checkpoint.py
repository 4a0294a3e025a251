"""What every model file offers, whatever its format (a config, tensors by name, a tokenizer), and how it is opened."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.config import ModelConfig
from foreword.models.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix as its file stores it: rows of quantised blocks."""

    kind: str  # block format: "Q4_0", "Q4_1", "Q8_0", ...
    data: NDArray[np.uint8]  # [rows, bytes per row]
    shape: tuple[int, int]  # (out, in), in elements


class TensorPart(NamedTuple):
    """A stretch of a tensor's rows or of its columns; None: all."""

    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def of(self, whole: Tensor) -> Tensor:
        """That part of a tensor, as a view."""
        if self.rows is not None:
            whole = whole[slice(*self.rows)]
        return whole if self.columns is None else whole[:, slice(*self.columns)]


WHOLE = TensorPart()


class Checkpoint(Protocol):
    """An opened model. Tensors have Hugging Face's names, layout and rotary order."""

    @property
    def path(self) -> Path:
        """The file or directory that was opened."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The decoder's shape."""
        ...

    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors that `load` can give; no lm_head.weight if the embeddings are tied."""
        ...

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of its own (not a view of the file) in `dtype`, on the CPU."""
        ...

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        """The tensor in stretches of at most so many rows, in their order; a file is read stretch by stretch."""
        ...

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The tensor's blocks as stored; None if it is not stored quantised."""
        ...

    def release(self) -> None:
        """Give back the memory of what was read so far; it can be read again."""
        ...

    def sampling_defaults(self) -> dict[str, float]:
        """Sampling parameters that the model's makers recommend, by the names of `SamplingParams`."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the model, checked against its vocabulary."""
        ...


class ModelFile(Checkpoint, Protocol):
    """A checkpoint that can be read in parts."""

    def load_part(self, name: str, dtype: torch.dtype, part: TensorPart) -> Tensor:
        """As `load`, of whole heads where rows are turned; what is outside the part takes no memory that stays."""
        ...


def stretches(whole: Tensor, rows: int) -> Iterator[Tensor]:
    """Views of a loaded tensor, of at most so many rows each; a single number is one row."""
    whole = whole.reshape(-1) if whole.ndim == 0 else whole
    for start in range(0, len(whole), rows):
        yield whole[start : start + rows]


def missing_tensor(name: str, path: Path) -> CheckpointError:
    """The error for a tensor that a checkpoint does not hold."""
    return CheckpointError(f"{path}: tensor {name} is missing; the model is incomplete, get it again")


def open_checkpoint(path: Path) -> ModelFile:
    """Open a `.gguf` file or a Hugging Face directory; the weights are read later, by name."""
    if path.is_dir():
        from foreword.models.formats.hf.checkpoint import HfCheckpoint

        return HfCheckpoint(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a .gguf file or a model directory")
    if path.suffix.lower() == ".gguf":
        from foreword.models.formats.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    raise CheckpointError(
        f"{path} is neither a .gguf file nor a directory; give one of those (safetensors: the directory)"
    )
