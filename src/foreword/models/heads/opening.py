"""Opens a head: reads its description, and drops copies of the target's matrices."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import (
    Checkpoint,
    PackedTensor,
    QuantizedTensor,
    rotated_rows,
    row_pieces,
)
from foreword.models.formats.gguf.checkpoint import dequantized
from foreword.models.heads.files import HeadFiles, PackedMatrix, draft_token_ids, fitted
from foreword.models.heads.mtp import mtp_files, read_mtp
from foreword.models.heads.names import OUTPUT, head_kind
from foreword.models.heads.published import medusa_files, read_dflash, read_eagle, read_eagle3, read_medusa
from foreword.models.heads.spec import HeadSpec, Join

_EMBEDDING = "embed_tokens.weight"
_GATHERED_ROWS = 512  # of a mapped file: the system maps up to 64 KiB around each
_PIECE_ROWS = 4096  # of the target's output matrix in memory at once

_READERS = {
    "eagle": read_eagle,
    "eagle3": read_eagle3,
    "p_eagle": read_eagle3,
    "medusa": read_medusa,
    "mtp": read_mtp,
    "dflash": read_dflash,
    "dspark": read_dflash,
}
_OWN_FILES = {"medusa": medusa_files, "mtp": mtp_files}
"""Readers of heads that may be stored with their target: they select the head's tensors."""


@dataclass(frozen=True)
class Head:
    """An opened head: description and tensors."""

    spec: HeadSpec
    files: HeadFiles
    token_ids: Tensor | None  # int64 [draft vocabulary], the target's ids; None: identical
    output_source: Checkpoint | None = None  # the target, if it provides the output matrix

    @property
    def acceptance_by_level(self) -> tuple[float, ...]:
        """Return the published acceptance by level from the config; empty: none."""
        found = self.files.config.get("acceptance_by_level")
        rates = found if isinstance(found, list) else []
        is_right = all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates)
        return tuple(map(float, rates)) if is_right else ()

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        if name == OUTPUT and self.output_source is not None:
            return output_rows(self.output_source, self.token_ids, dtype)
        if self.spec.norms_minus_one and name.endswith("norm.weight"):
            return (self.files.load(name) + 1).to(dtype)
        tensor = self.files.load(name, dtype)
        if name == "fc.weight" and self.spec.hidden_first:
            return tensor.roll(self.spec.hidden_size, dims=1)  # embedding first, as in all other heads
        if self.spec.interleaved and name.startswith("layers."):
            rotated = rotated_rows(self.spec.layers[0].attention).get(name.split(".", 2)[2])
            return tensor if rotated is None else tensor[torch.from_numpy(rotated.order())]
        return tensor

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """Yield a matrix in float32 in pieces of at most `rows` rows; only a reordered one is read whole."""
        blocks = self.blocks(name)
        if blocks is not None:
            for begin in range(0, len(blocks.data), rows):
                yield dequantized(blocks.kind, blocks.data[begin : begin + rows], torch.float32)
        elif (name == OUTPUT and self.output_source is not None) or self._is_reordered(name):
            yield from row_pieces(self.load(name), rows)
        else:
            yield from self.files.pieces(name, rows)

    def blocks(self, name: str) -> QuantizedTensor | None:
        """Return the target's rows of the head's vocabulary as stored; None if they are not the matrix, or floats."""
        if name != OUTPUT or self.output_source is None or self.token_ids is None:
            return None
        stored = self.output_source.quantized(_output_name(self.output_source))
        if stored is None:
            return None
        ids = self.token_ids.numpy()
        rows = np.empty((len(ids), stored.data.shape[1]), np.uint8)
        for part in np.array_split(np.argsort(ids), -(-len(ids) // _GATHERED_ROWS)):
            rows[part] = stored.data[ids[part]]
            self.output_source.release()
        return QuantizedTensor(stored.kind, rows, (len(rows), stored.shape[1]))

    def kept(self, name: str) -> PackedTensor | None:
        """Return a matrix of a quantised checkpoint as stored; None if it must be unpacked."""
        is_own = not self._is_reordered(name) and (name != OUTPUT or self.output_source is None)
        return self.files.kept(name) if is_own else None

    def _is_reordered(self, name: str) -> bool:
        return self.spec.interleaved or (name == "fc.weight" and self.spec.hidden_first)

    def packed(self, name: str) -> PackedMatrix | None:
        """Return a matrix in 8 bits as stored; None if it must be unpacked."""
        return None if self._is_reordered(name) else self.files.packed(name)

    def fitted(self, target: ModelConfig) -> "Head":
        return replace(self, spec=fitted(self.spec, target, str(self.files.path)))


def open_head(path: Path, kind: str | None = None) -> Head:
    """Read a head's description; weights are read later. Without a `kind`, the tensors determine it."""
    files = HeadFiles(path)
    kind = kind or head_kind(files.shapes)
    if kind is None:
        raise CheckpointError(
            f"{path} holds no draft head that is known; see docs/drafters.md for those that are"
        )
    if kind not in _READERS:
        raise CheckpointError(
            f"{path} holds a {kind} head, which is not supported; use {' or '.join(_READERS)}"
        )
    if kind in _OWN_FILES:
        files = _OWN_FILES[kind](files)
    spec = _READERS[kind](files)
    return Head(spec, files, draft_token_ids(spec, files))


def without_copies(head: Head, target: Checkpoint) -> Head:
    copies = [name for name in (_EMBEDDING, OUTPUT) if head.spec.has(name) and _is_copy(head, name, target)]
    shapes = {name: shape for name, shape in head.spec.shapes.items() if name not in copies}
    return replace(head, spec=replace(head.spec, shapes=shapes)) if copies else head


def _is_copy(head: Head, name: str, target: Checkpoint) -> bool:
    stored = head.files.stored(name)
    if not stored.dtype.is_floating_point or head.spec.hidden_size != head.spec.target_hidden_size:
        return False
    if name == _EMBEDDING:
        theirs = target.load(f"model.{name}", stored.dtype)
    else:
        theirs = output_rows(target, head.token_ids, stored.dtype)
    return torch.equal(stored, theirs)


def with_output(head: Head, target: Checkpoint) -> Head:
    """Return the head with the target's output rows of its vocabulary, if it has a vocabulary and no output."""
    if head.token_ids is None or head.spec.join is Join.NONE or head.spec.has(OUTPUT):
        return head
    shapes = {**head.spec.shapes, OUTPUT: (len(head.token_ids), head.spec.hidden_size)}
    return replace(head, spec=replace(head.spec, shapes=shapes), output_source=target)


def _output_name(target: Checkpoint) -> str:
    return OUTPUT if OUTPUT in target.tensor_names() else f"model.{_EMBEDDING}"


def output_rows(target: Checkpoint, token_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return rows of the target's output matrix; None: all."""
    name = _output_name(target)
    if token_ids is None:
        return target.load(name, dtype)
    if (stored := target.quantized(name)) is not None:
        return dequantized(stored.kind, stored.data[token_ids.numpy()], dtype)
    ascending, order = token_ids.sort()
    rows, begin = [], 0
    for piece in target.pieces(name, dtype, _PIECE_ROWS):  # the whole matrix would take too much memory
        rows.append(piece[ascending[(ascending >= begin) & (ascending < begin + len(piece))] - begin])
        begin += len(piece)
    return torch.cat(rows)[order.argsort()]
