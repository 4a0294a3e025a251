"""A GGUF file as a checkpoint: its names and its row order turned into Hugging Face's."""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.formats.checkpoint import QuantizedTensor, missing_tensor
from foreword.models.formats.generation import GGUF_KEYS, sampling_values
from foreword.models.formats.gguf.config import ROPE_FACTORS, gguf_config, gguf_family
from foreword.models.formats.gguf.file import GgufFile
from foreword.models.formats.gguf.names import GgufPlace, places, tensor_parts
from foreword.models.formats.gguf.settings import ROPE_TENSORS
from foreword.models.formats.gguf.tokenizer import gguf_tokenizer
from foreword.models.tokenization.tokenizer import Tokenizer, check_vocab

_UNQUANTIZED = ("F32", "F16", "BF16")
_CHUNK_ELEMENTS = 2**21  # dequantised at a time: bounds the extra memory of loading


class GgufCheckpoint:
    """One GGUF model file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        _, names = gguf_family(self._file)
        parts = tensor_parts(self._file.tensors, names, path, (ROPE_FACTORS, *ROPE_TENSORS))
        self.config = gguf_config(self._file, frozenset(name for held in parts.values() for name in held))
        self._interleaved = names.interleaved
        self._places = places(parts, self._file.tensors, self.config, path)

    def tensor_names(self) -> frozenset[str]:
        """Canonical names of the file's tensors."""
        return frozenset(self._places)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor, dequantised, in Hugging Face's layout."""
        place = self._place(name)
        tensor = self._file.tensors[place.stored]
        rows = self._rows(name)
        kind = GGMLQuantizationType[tensor.kind]
        loaded = torch.empty((rows.shape[0], tensor.shape[-1]), dtype=dtype)
        step = max(1, _CHUNK_ELEMENTS // tensor.shape[-1])
        for start in range(0, rows.shape[0], step):
            chunk = np.ascontiguousarray(rows[start : start + step])
            loaded[start : start + step] = torch.from_numpy(np.array(dequantize(chunk, kind), np.float32))
        is_matrix = place.rows is not None or name.endswith("shared_expert_gate.weight")
        return loaded if is_matrix else loaded.reshape(tensor.shape)

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The tensor's blocks, rows in Hugging Face's order; copied only where the file's order differs."""
        place = self._place(name)
        tensor = self._file.tensors[place.stored]
        if tensor.kind in _UNQUANTIZED or (len(tensor.shape) != 2 and place.rows is None):
            return None
        rows = self._rows(name)
        return QuantizedTensor(tensor.kind, rows, (len(rows), tensor.shape[-1]))

    def release(self) -> None:
        """Let the system take back the mapped pages."""
        self._file.release()

    def sampling_defaults(self) -> dict[str, float]:
        """Those in the file's metadata."""
        return sampling_values(self._file.metadata, GGUF_KEYS, str(self.path))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the file's metadata."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = gguf_tokenizer(self._file)
        check_vocab(tokenizer, self.config)
        return tokenizer

    def _place(self, name: str) -> GgufPlace:
        if name not in self._places:
            raise missing_tensor(name, self.path)
        return self._places[name]

    def _rows(self, name: str) -> NDArray[np.uint8]:
        """Stored bytes [rows, bytes per row], rows of q and k in rotate-half order."""
        place = self._place(name)
        stored = self._file.rows(place.stored)
        if place.rows is not None:
            stored = stored[slice(*place.rows)]
        heads = self._interleaved_heads(name)
        if heads is None:
            return stored
        tensor, head_dim = self._file.tensors[place.stored], self.config.layers[0].attention.head_dim
        if tensor.shape[0] != heads * head_dim:
            raise CheckpointError(
                f"{self.path}: {name} has {tensor.shape[0]} rows, not {heads} heads; get the file again"
            )
        rows = stored.reshape(tensor.shape[0], -1)  # a bias is stored as one row: [out, 4]
        return rows[_rotate_half_order(heads, head_dim)].reshape(stored.shape)

    def _interleaved_heads(self, name: str) -> int | None:
        """Heads of a tensor that is stored with rotated pairs side by side."""
        if not self._interleaved:
            return None
        attention = self.config.layers[0].attention
        if ".q_proj." in name:
            return attention.num_heads
        return attention.num_kv_heads if ".k_proj." in name else None


def _rotate_half_order(heads: int, head_dim: int) -> NDArray[np.intp]:
    """For every row in rotate-half order, the row of the interleaved order that it is."""
    interleaved = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return interleaved.swapaxes(1, 2).reshape(-1)
