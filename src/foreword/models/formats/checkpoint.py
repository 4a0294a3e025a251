"""Interface of model files (config, tensors by name, tokenizer), and how they are opened."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.config import AttentionSpec, ModelConfig
from foreword.models.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix as stored: rows of quantised blocks."""

    kind: str  # block format: "Q4_0", "Q4_1", "Q8_0", ...
    data: NDArray[np.uint8]  # [rows, bytes per row]
    shape: tuple[int, int]  # (out, in), in elements


class TensorPart(NamedTuple):
    """A range of a tensor's rows or columns; None: all."""

    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a tensor, as a view."""
        if self.rows is not None:
            whole = whole[slice(*self.rows)]
        return whole if self.columns is None else whole[:, slice(*self.columns)]


WHOLE = TensorPart()


class Checkpoint(Protocol):
    """An opened model. Tensors have Hugging Face's names, layout and rotary order."""

    @property
    def path(self) -> Path:
        """The file or directory that was opened."""

    @property
    def config(self) -> ModelConfig:
        """The decoder's shape."""

    def tensor_names(self) -> frozenset[str]:
        """Return the names of all tensors; no lm_head.weight if the embeddings are tied."""

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """Load a tensor as a copy in `dtype`, on the CPU."""

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        """Yield the tensor in pieces of at most `rows` rows, read one by one."""

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Return the tensor's stored blocks; None if it is not quantised."""

    def release(self) -> None:
        """Release the memory of file pages read so far."""

    def sampling_defaults(self) -> dict[str, float]:
        """Return recommended sampling parameters by the names of `SamplingParams`."""

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, checked against its vocabulary."""


class ModelFile(Checkpoint, Protocol):
    """A checkpoint that can be loaded in parts."""

    def weight_format(self) -> str:
        """Return the stored data type or quantisation, such as BF16 or Q4_K_M; empty if the files do not say."""
        ...

    def load_part(self, name: str, dtype: torch.dtype, part: TensorPart) -> Tensor:
        """Load a part of a tensor (whole heads where rows are rotated), without keeping the rest in memory."""


def stretches(whole: Tensor, rows: int) -> Iterator[Tensor]:
    """Yield views of a tensor of at most `rows` rows each; a scalar is one row."""
    whole = whole.reshape(-1) if whole.ndim == 0 else whole
    for start in range(0, len(whole), rows):
        yield whole[start : start + rows]


def missing_tensor(name: str, path: Path) -> CheckpointError:
    """Return the error for a missing tensor."""
    return CheckpointError(f"{path}: tensor {name} is missing; the model is incomplete, get it again")


def open_checkpoint(path: Path) -> ModelFile:
    """Open a `.gguf` file or a Hugging Face directory; weights are read later."""
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


@dataclass(frozen=True)
class RotatedRows:
    """Rows of heads whose last dimensions are rotated pairs."""

    rows: int  # total
    head: int  # per head
    rotated: int  # rotated rows at the end of a head

    def order(self) -> NDArray[np.intp]:
        """Return the stored row of each row."""
        one = np.arange(self.head)
        one[-self.rotated :] = one[-self.rotated :].reshape(-1, 2).T.reshape(-1)
        first = np.arange(0, self.rows, self.head)
        return (first[:, None] + one).reshape(-1)


def rotated_rows(attention: AttentionSpec) -> dict[str, RotatedRows]:
    """Return by name in a layer: queries and keys, or the rotated parts of latent attention."""
    latent = attention.latent
    if latent is None:
        found = {
            "q_proj": RotatedRows(attention.query_width, attention.head_dim, attention.head_dim),
            "k_proj": RotatedRows(attention.kv_width, attention.head_dim, attention.head_dim),
        }
    else:
        heads = RotatedRows(attention.query_width, attention.head_dim, latent.rope_dim)
        shared = RotatedRows(latent.row_dim, latent.row_dim, latent.rope_dim)
        found = {"q_proj": heads, "q_b_proj": heads, "kv_a_proj_with_mqa": shared}
    return {
        f"self_attn.{name}.{kind}": turned for name, turned in found.items() for kind in ("weight", "bias")
    }


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
