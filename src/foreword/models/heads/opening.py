"""Opens a head: reads its description, and replaces copies of the target's matrices by the target's own."""

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
from foreword.models.heads.blocks import read_dflash
from foreword.models.heads.files import HeadFiles, PackedMatrix, draft_token_ids, fitted
from foreword.models.heads.mtp import mtp_files, read_mtp
from foreword.models.heads.names import OUTPUT, head_kind
from foreword.models.heads.published import medusa_files, read_eagle, read_eagle3, read_medusa
from foreword.models.heads.spec import HeadSpec, Join

_EMBEDDING = "embed_tokens.weight"
# Rows that are read from a mapped file before its memory is released; a row maps up to 64 KiB.
_GATHERED_ROWS = 512
_PIECE_ROWS = 4096  # rows of the target's output matrix that are in memory at once

_READERS = {
    "eagle": read_eagle,
    "eagle3": read_eagle3,
    "p_eagle": read_eagle3,
    "medusa": read_medusa,
    "mtp": read_mtp,
    "dflash": read_dflash,
    "dspark": read_dflash,
    "dflash2": read_dflash,
}


@dataclass(frozen=True)
class Head:
    """An opened head: its description and its tensors."""

    spec: HeadSpec
    files: HeadFiles
    token_ids: Tensor | None  # int64 [draft vocabulary], the target's ids of its tokens; None: the same ids
    # The target, if the output matrix consists of rows of the target's.
    output_source: Checkpoint | None = None

    @property
    def acceptance_by_level(self) -> tuple[float, ...]:
        """Acceptance rate at each level, published in the head's config; empty if there is none."""
        stated = self.files.config.get("acceptance_by_level")
        rates = stated if isinstance(stated, list) else []
        is_valid = all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates)
        return tuple(map(float, rates)) if is_valid else ()

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Load a tensor in `dtype`, dequantised, in canonical order."""
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
        """Yield a matrix in float32 in pieces of at most `rows` rows.

        It is read piece by piece, unless it is reordered or consists of rows of the target's plain floats.
        """
        blocks = self.blocks(name)
        if blocks is not None:
            for begin in range(0, len(blocks.data), rows):
                yield dequantized(blocks.kind, blocks.data[begin : begin + rows], torch.float32)
        elif (name == OUTPUT and self.output_source is not None) or self._is_reordered(name):
            yield from row_pieces(self.load(name), rows)
        else:
            yield from self.files.pieces(name, rows)

    def blocks(self, name: str) -> QuantizedTensor | None:
        """Return the output matrix in quantised blocks, if it has rows of the target's; None for other matrices."""
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

    def packed_tensor(self, name: str) -> PackedTensor | None:
        """Return a matrix of a quantised head in a form that kernels read; None: plain floats, or another form."""
        is_stored = not self._is_reordered(name) and (name != OUTPUT or self.output_source is None)
        return self.files.packed_tensor(name) if is_stored else None

    def _is_reordered(self, name: str) -> bool:
        return self.spec.interleaved or (name == "fc.weight" and self.spec.hidden_first)

    def packed_int8(self, name: str) -> PackedMatrix | None:
        """Return a matrix in Foreword's 8-bit format as stored; None if it has another format or is reordered."""
        return None if self._is_reordered(name) else self.files.packed_int8(name)

    def fitted(self, target: ModelConfig) -> "Head":
        """Return the head for this target; raise `CheckpointError` if it does not fit."""
        return replace(self, spec=fitted(self.spec, target, str(self.files.path)))


def open_head(path: Path, kind: str | None = None) -> Head:
    """Open a head; its weights are read later. Without `kind` (the method), the tensors determine it."""
    files = HeadFiles(path)
    kind = kind or head_kind(files.shapes)
    if kind is None:
        raise CheckpointError(
            f"{path} holds no draft head of a known layout; docs/drafters.md lists the supported heads"
        )
    if kind not in _READERS:
        raise CheckpointError(
            f"{path} holds a {kind} head, which is not supported; use {' or '.join(_READERS)}"
        )
    # Medusa heads and MTP modules may be stored with their target.
    select_files = {"medusa": medusa_files, "mtp": mtp_files}.get(kind)
    files = files if select_files is None else select_files(files)
    spec = _READERS[kind](files)
    return Head(spec, files, draft_token_ids(spec, files))


def without_copies(head: Head, target: Checkpoint) -> Head:
    """Return the head without its copies of the target's tensors, so that it uses the target's own."""
    copies = [name for name in (_EMBEDDING, OUTPUT) if head.spec.has(name) and _is_copy(head, name, target)]
    shapes = {name: shape for name, shape in head.spec.shapes.items() if name not in copies}
    return replace(head, spec=replace(head.spec, shapes=shapes)) if copies else head


def _is_copy(head: Head, name: str, target: Checkpoint) -> bool:
    stored = head.files.stored(name)
    if not stored.dtype.is_floating_point or head.spec.hidden_size != head.spec.target_hidden_size:
        return False
    if name == _EMBEDDING:
        return torch.equal(stored, target.load(f"model.{name}", stored.dtype))
    return torch.equal(stored, output_rows(target, head.token_ids, stored.dtype))


def with_output(head: Head, target: Checkpoint) -> Head:
    """Return the head with an output matrix: its own, or the target's rows for the head's draft vocabulary."""
    if head.token_ids is None or head.spec.join is Join.NONE or head.spec.has(OUTPUT):
        return head
    shapes = {**head.spec.shapes, OUTPUT: (len(head.token_ids), head.spec.hidden_size)}
    return replace(head, spec=replace(head.spec, shapes=shapes), output_source=target)


def _output_name(target: Checkpoint) -> str:
    return OUTPUT if OUTPUT in target.tensor_names() else f"model.{_EMBEDDING}"


def output_rows(target: Checkpoint, token_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the rows of the target's output matrix for these tokens; None: for all tokens."""
    name = _output_name(target)
    if token_ids is None:
        return target.load(name, dtype)
    if (stored := target.quantized(name)) is not None:
        return dequantized(stored.kind, stored.data[token_ids.numpy()], dtype)
    ascending, order = token_ids.sort()
    rows, begin = [], 0
    for piece in target.pieces(name, dtype, _PIECE_ROWS):  # in pieces, to save memory
        rows.append(piece[ascending[(ascending >= begin) & (ascending < begin + len(piece))] - begin])
        begin += len(piece)
    return torch.cat(rows)[order.argsort()]
