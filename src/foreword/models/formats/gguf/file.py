"""Reads the structure of a GGUF file: metadata and tensors, with all sizes checked."""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from foreword.errors import CheckpointError

SUPPORTED_TYPES = frozenset(
    ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
)
"""Readable tensor types; the gguf package dequantises all of them."""
_TYPE_NAMES = {kind.value: kind.name for kind in GGMLQuantizationType}

# Type codes of metadata values, with struct's formats.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct(f"<{letter}") for kind, letter in _FORMATS.items()}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32  # bytes
_MAX_TENSOR_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 2


@dataclass(frozen=True)
class GgufTensor:
    """Location and storage of one tensor."""

    name: str  # stored name
    kind: str  # one of SUPPORTED_TYPES
    shape: tuple[int, ...]  # outermost dimension first
    offset: int  # from the start of the file
    row_bytes: int  # bytes of one innermost row

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=object)) * self.row_bytes


class GgufFile:
    """A memory-mapped GGUF file: `metadata` by key, `tensors` by name, `rows` of a tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map_file(path)
        reader = _Reader(self._bytes, path)
        tensor_count, metadata_count = reader.header()
        self.metadata = reader.metadata(metadata_count)
        self.tensors = reader.tensors(tensor_count, self._alignment())

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's stored bytes without a copy: uint8 [product of outer dimensions, bytes per row]."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self._bytes, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
        return flat.reshape(-1, tensor.row_bytes)

    def release(self) -> None:
        """Let the system drop the pages of the file that are in memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED)

    def drop_arrays(self, prefix: str) -> None:
        """Delete metadata arrays whose keys have this prefix: a vocabulary takes as much memory as a small model."""
        for key in [key for key in self.metadata if key.startswith(prefix)]:
            if isinstance(self.metadata[key], list):
                del self.metadata[key]

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise _damaged(self.path, f"alignment {alignment!r} is not a power of two")
        return alignment


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise _damaged(path, "the file is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a whole GGUF file: {reason}; get the file again")


class _Reader:
    """A cursor over the mapped file. No read or allocation goes beyond the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._size = len(data)
        self._position = 0

    def header(self) -> tuple[int, int]:
        """Check magic and version; return the numbers of tensors and metadata entries."""
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"{self._path} is not a GGUF file; give a .gguf file or a model directory")
        self._position = 4
        version = self._scalar(_U32)
        if version not in (2, 3):
            raise CheckpointError(
                f"{self._path} has GGUF version {version} (or is big-endian); convert it to GGUF version 3"
            )
        # A tensor header has at least 24 bytes, a metadata entry at least 13.
        return self._count(24), self._count(13)

    def metadata(self, count: int) -> dict[str, Any]:
        """Read `count` metadata entries, by key."""
        entries: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in entries:
                raise _damaged(self._path, f"metadata {key!r} appears twice")
            entries[key] = self._value(self._scalar(_U32), depth=0)
        return entries

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """Read `count` tensor headers, by name."""
        stored = [self._tensor_header() for _ in range(count)]
        start = _round_up(self._position, alignment)
        expected = 0
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in stored:
            tensor = GgufTensor(name, kind, shape, start + offset, self._row_bytes(name, kind, shape[-1]))
            # Tensors are contiguous and in order; other offsets indicate damage.
            if name in tensors or offset != expected:
                raise _damaged(self._path, f"tensor {name!r} is not at the expected offset")
            if tensor.offset + tensor.nbytes > self._size:
                raise _damaged(self._path, f"the data of tensor {name!r} runs past the end of the file")
            expected = _round_up(offset + tensor.nbytes, alignment)
            tensors[name] = tensor
        return tensors

    def _tensor_header(self) -> tuple[str, str, tuple[int, ...], int]:
        """Read (name, type, shape, offset after the headers) of a tensor."""
        name = self._string()
        dimensions = self._scalar(_U32)
        if not 1 <= dimensions <= _MAX_TENSOR_DIMENSIONS:
            raise _damaged(self._path, f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._scalar(_U64) for _ in range(dimensions))[::-1]
        if not all(0 < size <= 2**40 for size in shape):
            raise _damaged(self._path, f"tensor {name!r} has shape {shape}")
        return name, self._tensor_type(name), shape, self._scalar(_U64)

    def _tensor_type(self, name: str) -> str:
        code = self._scalar(_U32)
        kind = _TYPE_NAMES.get(code, f"number {code}")
        if kind not in SUPPORTED_TYPES:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} has type {kind}, which is not supported; "
                f"use a file with {', '.join(sorted(SUPPORTED_TYPES))}"
            )
        return kind

    def _row_bytes(self, name: str, kind: str, row_elements: int) -> int:
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        if row_elements % block_elements:
            raise _damaged(self._path, f"rows of {name!r} are not whole {kind} blocks")
        return int(row_elements // block_elements * block_bytes)

    def _value(self, kind: int, depth: int) -> Any:  # noqa: ANN401
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            return self._array(depth + 1)
        raise _damaged(self._path, f"metadata of unknown type {kind}")

    def _array(self, depth: int) -> list[Any]:
        kind = self._scalar(_U32)
        if kind in _SCALARS:
            width = _SCALARS[kind].size
            count = self._count(width)
            raw = self._take(count * width)
            return list(struct.unpack(f"<{count}{_FORMATS[kind]}", raw))
        count = self._count(8)
        if kind == _STRING:
            return self._strings(count)
        return [self._value(kind, depth) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """Read `count` strings. This is one loop without calls, since a vocabulary has several hundred thousand."""
        texts: list[str] = []
        data, size, read_length, position = self._data, self._size, _U64.unpack_from, self._position
        for _ in range(count):
            begin = position + _U64.size
            end = begin + read_length(data, position)[0] if begin <= size else begin
            if end > size:
                break
            try:
                texts.append(data[begin:end].decode())
            except UnicodeDecodeError:
                break
            position = end
        self._position = position
        while len(texts) < count:
            texts.append(self._string())  # raises the error for the string that ended the loop
        return texts

    def _string(self) -> str:
        raw = self._take(self._count(1))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _damaged(self._path, f"bytes before {self._position} are not text") from None

    def _count(self, least_bytes: int) -> int:
        """Read a count of entries that have at least `least_bytes` bytes each.

        Raise if the file is too short for them, so that a damaged count cannot exhaust memory.
        """
        count = int(self._scalar(_U64))
        if count * least_bytes > self._size - self._position:
            raise _damaged(self._path, f"the count {count} at byte {self._position - 8} is too large")
        return count

    def _scalar(self, form: struct.Struct) -> Any:  # noqa: ANN401
        begin = self._advance(form.size)
        return form.unpack_from(self._data, begin)[0]

    def _take(self, count: int) -> bytes:
        begin = self._advance(count)
        return self._data[begin : self._position]

    def _advance(self, count: int) -> int:
        """Move the cursor past the next `count` bytes; return where they begin."""
        begin = self._position
        if begin + count > self._size:
            raise _damaged(self._path, f"it ends within its header, after {self._size} bytes")
        self._position = begin + count
        return begin


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
