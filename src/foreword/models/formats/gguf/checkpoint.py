"""Reads a GGUF model file; tensors get Hugging Face's names and row order."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.native import native_status
from foreword.models.formats.checkpoint import LocatedTensors, QuantizedTensor, TensorPart, row_pieces
from foreword.models.formats.fields import GGUF_KEYS, ConfigFields, sampling_values
from foreword.models.formats.gguf.config import ROPE_TENSORS, gguf_config, gguf_family, module_layers
from foreword.models.formats.gguf.file import GgufFile
from foreword.models.formats.gguf.locations import (
    GgufLocation,
    module_tensors,
    tensor_locations,
    tensor_parts,
)
from foreword.models.formats.gguf.tokenizer import TOKENIZER_PREFIX, gguf_tokenizer
from foreword.models.tokenization.tokenizer import Tokenizer

_UNQUANTIZED = ("F32", "F16", "BF16")
_VECTORS = (".A_log", ".D", ".dt_bias", "linear_attn.norm.weight")  # vectors that may be stored as matrices
_CONVOLUTION = "conv1d.weight"
_ELEMENTS_AT_ONCE = 2**19  # elements that a thread dequantises at once, which limits the additional memory
_THREADS = min(8, os.cpu_count() or 1)


def dequantized(kind: str, rows: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Dequantise blocks of the format `kind`, uint8 [rows, bytes per row], to [rows, columns] in `dtype`."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]  # elements and bytes of a block
    columns = rows.shape[1] // size * numbers
    loaded = torch.empty((rows.shape[0], columns), dtype=dtype)
    step = max(1, _ELEMENTS_AT_ONCE // columns)

    def fill(start: int) -> None:
        loaded[start : start + step] = _floats(
            kind, np.ascontiguousarray(rows[start : start + step]), columns
        )

    with ThreadPoolExecutor(_THREADS) as pool:  # kernels and NumPy work without the interpreter's lock
        list(pool.map(fill, range(0, rows.shape[0], step)))
    return loaded


@cache
def _native_kinds() -> tuple[str, ...]:
    """Return the block formats that the compiled kernels dequantise."""
    if not native_status().available:
        return ()
    from foreword.kernels import _native

    return tuple(_native.BLOCK_KINDS)


def _floats(kind: str, rows: NDArray[np.uint8], columns: int) -> Tensor:
    """Dequantise to float32 with the compiled kernels, or else with NumPy: the same numbers, but slower."""
    if kind in _native_kinds():
        from foreword.kernels import _native

        floats = torch.empty((len(rows), columns))
        _native.dequantize(kind, rows, floats)
        return floats
    return torch.from_numpy(np.array(dequantize(rows, GGMLQuantizationType[kind]), np.float32))


class GgufCheckpoint(LocatedTensors[GgufLocation]):
    """One GGUF model file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        _, names = gguf_family(self._file)
        fields = ConfigFields(self._file.metadata, str(path), prefix=f"{names.architecture}.")
        modules = module_tensors(self._file.tensors, module_layers(fields))
        parts = tensor_parts(self._file.tensors, names, path, (*ROPE_TENSORS, *modules))
        self.config = gguf_config(self._file, frozenset(chain.from_iterable(parts.values())))
        self._locations = tensor_locations(parts, self._file.tensors, names, self.config, path)

    def weight_format(self) -> str:
        """Return the quantisation that the file's metadata names, such as Q4_K_M."""
        try:
            named = LlamaFileType(self._file.metadata.get("general.file_type", -1))
        except ValueError:
            return ""
        return named.name.removeprefix("ALL_").removeprefix("MOSTLY_")

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        location = self._location(name)
        tensor = self._file.tensors[location.stored]
        if location.values is not None:
            return self._latent_expansion(location.stored, location.values, dtype)
        if name.endswith(".A_log"):
            return self._decay_logarithms(name).to(dtype)
        loaded = dequantized(tensor.kind, self._rows(name), dtype)
        if name.endswith((".bias", *_VECTORS)):
            return loaded.reshape(-1)
        if name.endswith(_CONVOLUTION):
            return loaded.unsqueeze(1)
        if location.columns is not None:
            return loaded[:, location.columns.order()]
        is_matrix = len(tensor.shape) == 2 or location.rows is not None
        is_shaped = is_matrix or name.endswith("shared_expert_gate.weight")
        return loaded if is_shaped else loaded.reshape(tensor.shape)

    def load_part(self, name: str, dtype: torch.dtype, part: TensorPart) -> Tensor:
        location = self._location(name)
        tensor = self._file.tensors[location.stored]
        if not self._is_matrix(name) or location.columns is not None:
            return part.of(self.load(name, dtype)).clone()
        rows = self._rows(name)
        if part.rows is not None:
            rows = rows[slice(*part.rows)]
        if part.columns is None:
            return dequantized(tensor.kind, rows, dtype)
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]  # elements and bytes of a block
        begin, end = part.columns
        first_block, end_block = begin // numbers, -(-end // numbers)
        loaded = dequantized(tensor.kind, rows[:, first_block * size : end_block * size], dtype)
        return loaded[:, begin - first_block * numbers : end - first_block * numbers].clone()

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        location = self._location(name)
        tensor = self._file.tensors[location.stored]
        if not self._is_matrix(name):
            yield from row_pieces(self.load(name, dtype), rows)
            return
        stored = self._rows(name)
        columns = None if location.columns is None else location.columns.order()
        for start in range(0, len(stored), rows):
            piece = dequantized(tensor.kind, stored[start : start + rows], dtype)
            yield piece if columns is None else piece[:, columns]

    def _is_matrix(self, name: str) -> bool:
        """Return whether the rows of the tensor are rows of one stored tensor."""
        location = self._location(name)
        has_rows = len(self._file.tensors[location.stored].shape) == 2 or location.rows is not None
        return has_rows and location.values is None and not name.endswith((".bias", _CONVOLUTION, *_VECTORS))

    def _decay_logarithms(self, name: str) -> Tensor:
        """Return the logarithms of a recurrent layer's decay rates; the file has the negative rates."""
        tensor = self._file.tensors[self._location(name).stored]
        stored = dequantized(tensor.kind, self._rows(name), torch.float32)
        if not bool((stored < 0).all()):
            raise CheckpointError(
                f"{self.path}: {tensor.name} has rates that are not below 0; get the file again"
            )
        return (-stored).log().reshape(-1)

    def _latent_expansion(self, keys: str, values: str, dtype: torch.dtype) -> Tensor:
        """Return the matrix that expands latent rows to keys and values of all heads, `kv_b_proj`.

        Newer files store it as the two tensors `keys` [heads, rank, size] and `values` [heads, size, rank].
        """
        stored = [self._file.tensors[name] for name in (keys, values)]
        shapes = [tensor.shape for tensor in stored]
        fit = all(len(shape) == 3 for shape in shapes) and shapes[0][:2] == (shapes[1][0], shapes[1][2])
        if not fit:
            raise CheckpointError(
                f"{self.path}: {keys} and {values} do not fit each other: {shapes}; get the file again"
            )
        parts = [
            dequantized(tensor.kind, self._file.rows(tensor.name), dtype).view(tensor.shape)
            for tensor in stored
        ]
        return torch.cat((parts[0].transpose(1, 2), parts[1]), dim=1).flatten(0, 1)

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Return the tensor's blocks in Hugging Face's row and column order; copied only if the file's order differs.

        None: the tensor is not quantised, or columns must be reordered and a block has columns of several heads.
        """
        location = self._location(name)
        tensor = self._file.tensors[location.stored]
        if tensor.kind in _UNQUANTIZED or not self._is_matrix(name):
            return None
        rows = self._rows(name)
        if location.columns is not None:
            numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
            if location.columns.width % numbers:
                return None
            blocks = replace(location.columns, width=location.columns.width // numbers)
            rows = rows.reshape(len(rows), -1, size)[:, blocks.order()].reshape(len(rows), -1)
        return QuantizedTensor(tensor.kind, rows, (len(rows), tensor.shape[-1]))

    def release(self) -> None:
        self._file.release()

    def sampling_defaults(self) -> dict[str, float]:
        return sampling_values(self._file.metadata, GGUF_KEYS, str(self.path))

    def _read_tokenizer(self) -> Tokenizer:
        tokenizer = gguf_tokenizer(self._file)
        self._file.drop_arrays(TOKENIZER_PREFIX)
        return tokenizer

    def _rows(self, name: str) -> NDArray[np.uint8]:
        """Return the tensor's stored bytes [rows, bytes per row], with the rows in Hugging Face's order."""
        location = self._location(name)
        tensor, stored = self._file.tensors[location.stored], self._file.rows(location.stored)
        if location.rows is not None:
            stored = stored[slice(*location.rows)]
        if location.columns is not None and tensor.shape[-1] != location.columns.rows:
            raise self._misfit(name, tensor.shape[-1], "columns", location.columns.rows)
        if location.order is None:
            return stored
        if tensor.shape[0] != location.order.rows:
            raise self._misfit(name, tensor.shape[0], "rows", location.order.rows)
        if len(tensor.shape) == 1 and tensor.kind not in _UNQUANTIZED:
            raise CheckpointError(
                f"{self.path}: {location.stored} is a quantised vector and cannot be reordered; get the file again"
            )
        rows = stored.reshape(
            tensor.shape[0], -1
        )  # a vector is stored as one row: here, each number becomes a row
        return rows[location.order.order()].reshape(-1, stored.shape[1])

    def _misfit(self, name: str, count: int, dimension: str, expected: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {name} has {count} {dimension}, its config says {expected}; get the file again"
        )
