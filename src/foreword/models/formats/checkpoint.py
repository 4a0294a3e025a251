"""Interface of model files (config, tensors by name, tokenizer), and the function that opens them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.config import AttentionSpec, ModelConfig
from foreword.models.tokenization.tokenizer import Tokenizer, check_vocab


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix in GGUF's quantised blocks, as stored."""

    kind: str  # block format: "Q4_0", "Q4_1", "Q8_0", ...
    data: NDArray[np.uint8]  # [rows, bytes per row]
    shape: tuple[int, int]  # (out, in), in elements


FP8_BLOCK = 128
"""Rows and columns of a block with one scale. FP8 matrices with other blocks are dequantised at load."""


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix in 8-bit floats, with scales per row or per block."""

    values: Tensor  # e4m3 [out, in]
    scales: Tensor  # float32 [out, 1]; if `in_blocks`, [out / FP8_BLOCK, in / FP8_BLOCK], rounded up
    in_blocks: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


@dataclass(frozen=True)
class GroupedTensor:
    """A matrix in 4-bit codes, with a scale per group of columns."""

    codes: Tensor  # uint8 [out, in], one code per byte
    scales: Tensor  # [out, groups]
    zeros: (
        Tensor | None
    )  # uint8 [out, groups], the code that stands for 0; None: code 8, or codes are `floats`
    # int32 [in], the matrix's column that each column of codes is for; None: the same.
    order: Tensor | None = None
    # Codes are 4-bit floats (E2M1). Scales are half of those in the file, since kernels use twice the codes' values,
    # which are integers.
    floats: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def rows(self, read: Callable[[Tensor], Tensor]) -> "GroupedTensor":
        """Return the matrix with the rows that `read` selects or reorders."""
        zeros = None if self.zeros is None else read(self.zeros)
        return replace(self, codes=read(self.codes), scales=read(self.scales), zeros=zeros)


PackedTensor = Fp8Tensor | GroupedTensor  # a quantised matrix that kernels read without dequantising it first


class TensorPart(NamedTuple):
    """A range (first, end) of a tensor's rows, and of its columns; None: all."""

    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a tensor."""
        if self.rows is not None:
            tensor = tensor[slice(*self.rows)]
        return tensor if self.columns is None else tensor[:, slice(*self.columns)]


WHOLE = TensorPart()


class Checkpoint(Protocol):
    """An opened model. Tensors have Hugging Face's names and layout, with rotated pairs half a head apart."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def tensor_names(self) -> frozenset[str]:
        """Return the names of all tensors; no lm_head.weight if the embeddings are tied."""

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """Load a tensor as a copy in `dtype`, on the CPU."""

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        """Yield the tensor in pieces of at most `rows` rows; each is read when it is needed."""

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Return the tensor's stored blocks; None if it is not quantised."""

    def release(self) -> None:
        """Release the memory of file pages read so far."""

    def sampling_defaults(self) -> dict[str, float]:
        """Return recommended sampling parameters by the names of `SamplingParams`."""

    def tokenizer(self) -> Tokenizer: ...


class DerivedCheckpoint:
    """Base class of checkpoints that change some tensors of an original; everything else is the original's."""

    def __init__(self, original: Checkpoint) -> None:
        self.original = original
        self.path, self.config = original.path, original.config

    def tensor_names(self) -> frozenset[str]:
        return self.original.tensor_names()

    def quantized(self, name: str) -> QuantizedTensor | None:
        return self.original.quantized(name)

    def release(self) -> None:
        self.original.release()

    def sampling_defaults(self) -> dict[str, float]:
        return self.original.sampling_defaults()

    def tokenizer(self) -> Tokenizer:
        return self.original.tokenizer()


class ModelFile(Checkpoint, Protocol):
    """A checkpoint that can be loaded in parts."""

    def weight_format(self) -> str:
        """Return the stored data type or quantisation, such as BF16 or Q4_K_M; empty if the files do not say."""

    def load_part(self, name: str, dtype: torch.dtype, part: TensorPart) -> Tensor:
        """Load a part of a tensor without keeping the rest in memory; of rows that are rotated, only whole heads."""


Location = TypeVar("Location")


class LocatedTensors(ABC, Generic[Location]):
    """Base class of checkpoints: the locations of tensors by canonical name, and a cached tokenizer."""

    path: Path
    config: ModelConfig
    _locations: dict[str, Location]

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._locations)

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._read_tokenizer()
        check_vocab(tokenizer, self.config)
        return tokenizer

    @abstractmethod
    def _read_tokenizer(self) -> Tokenizer: ...

    def _location(self, name: str) -> Location:
        if name not in self._locations:
            raise missing_tensor(name, self.path)
        return self._locations[name]


def row_pieces(tensor: Tensor, rows: int) -> Iterator[Tensor]:
    """Yield a loaded tensor in pieces of at most `rows` rows."""
    tensor = tensor.reshape(-1) if tensor.ndim == 0 else tensor
    for start in range(0, len(tensor), rows):
        yield tensor[start : start + rows]


def missing_tensor(name: str, path: Path) -> CheckpointError:
    """Return the error for a tensor that the files lack."""
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
    """Rows of a projection whose rotated pairs are stored next to each other, instead of half a head apart."""

    rows: int  # total number of rows
    head: int  # rows per head
    rotated: int  # rotated rows, at the end of a head

    def order(self) -> NDArray[np.intp]:
        """Return the index of the stored row for each row of the canonical order."""
        one_head = np.arange(self.head)
        # Pairs (0, 1), (2, 3), ... become 0, 2, ... and then 1, 3, ...
        one_head[-self.rotated :] = one_head[-self.rotated :].reshape(-1, 2).T.reshape(-1)
        first = np.arange(0, self.rows, self.head)
        return (first[:, None] + one_head).reshape(-1)


def rotated_rows(attention: AttentionSpec) -> dict[str, RotatedRows]:
    """Return the projections of a layer with rotated rows, by the names of their tensors in the layer."""
    latent = attention.latent
    if latent is None:
        projections = {
            "q_proj": RotatedRows(attention.query_width, attention.head_dim, attention.head_dim),
            "k_proj": RotatedRows(attention.kv_width, attention.head_dim, attention.head_dim),
        }
    else:
        heads = RotatedRows(attention.query_width, attention.head_dim, latent.rope_dim)
        shared = RotatedRows(latent.row_dim, latent.row_dim, latent.rope_dim)
        projections = {"q_proj": heads, "q_b_proj": heads, "kv_a_proj_with_mqa": shared}
    return {
        f"self_attn.{name}.{suffix}": rows
        for name, rows in projections.items()
        for suffix in ("weight", "bias")
    }


@contextmanager
def opened_safetensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file; raise `CheckpointError` if it cannot be read."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except SafetensorError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} is not a whole safetensors file ({reason}); get it again") from None
