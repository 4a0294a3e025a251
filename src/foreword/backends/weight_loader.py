"""Sources of a layer's tensors: the interface, and a loader that reads and checks a checkpoint for all backends."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import TypeVar

from foreword.cancellation import check_cancelled
from foreword.errors import CheckpointError
from foreword.models.formats.checkpoint import Checkpoint, Fp8Tensor, PackedTensor, QuantizedTensor
from foreword.models.formats.hf.checkpoint import HfCheckpoint
from foreword.models.layer_shapes import expected_shapes
from foreword.progress import Progress

_PIECE_ELEMENTS = 2**20
"""Numbers held in float32 at a time while packing: 4 MB."""

PANEL_ROWS = 8
"""Rows that the CPU kernels interleave; pieces begin at a multiple of it."""

M_co = TypeVar("M_co", covariant=True, default=Tensor)
"""Type of a matrix: a tensor, or a backend's own format."""


class LayerSource(Protocol[M_co]):
    """Source of the tensors of layers, by name."""

    @property
    def hidden_size(self) -> int: ...

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in the decoder's dtype."""

    def matrix(self, names: Sequence[str]) -> M_co:
        """Return matrices that read the same input as one, with their rows concatenated."""

    def floats(self, name: str) -> Tensor:
        """Return a tensor in float32."""

    def nothing(self, *shape: int) -> Tensor:
        """Return a tensor of this shape, which has no entries: it stands for weights that a layer does not have."""


@runtime_checkable
class ExpertSource(Protocol):
    """Source of tensors that may have the matrices of all experts in a backend's own format."""

    def experts(self, names: Sequence[Sequence[str]]) -> object | None:
        """Return the matrices of all experts, packed; None: load them one by one.

        `names` has, for every expert, the names of its matrices that read the same input.
        """


def piece_rows(columns: int) -> int:
    """Return how many rows of a matrix to pack at a time: whole panels, as many as fit in a piece's memory."""
    return max(1, _PIECE_ELEMENTS // columns // PANEL_ROWS) * PANEL_ROWS


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of tensors; return a single one without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def check_names(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` if tensors are missing or unknown."""
    present = checkpoint.tensor_names()
    expected = expected_shapes(checkpoint.config)
    ignorable = {"lm_head.weight"} if checkpoint.config.tied_embeddings else set()
    ignorable |= {name for name in present if name.endswith("rotary_emb.inv_freq")}
    missing = sorted(expected.keys() - present)
    surplus = sorted(present - expected.keys() - ignorable)
    for problem, names in (("lacks", missing), ("has unknown", surplus)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{checkpoint.path} {problem} tensor {names[0]}{more}: "
                "it does not fit its own config; get the files again or pick another model"
            )


class WeightLoader:
    """Loads tensors by name in one dtype to one device; checks shapes and reports progress."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        check_names(checkpoint)
        self._checkpoint = checkpoint
        self.dtype = dtype
        self.hidden_size = checkpoint.config.hidden_size
        self._device = device
        self._shapes = expected_shapes(checkpoint.config)
        self._progress = progress
        self._done = 0

    def nothing(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device)

    def tensor(self, name: str) -> Tensor:
        return self._load(name, self.dtype)

    def matrix(self, names: Sequence[str]) -> Tensor:
        return stacked([self.tensor(name) for name in names])

    def floats(self, name: str) -> Tensor:
        return self._load(name, torch.float32)

    def stored(self, name: str) -> PackedTensor | QuantizedTensor | None:
        """Return a packed matrix as it is stored, on the CPU; None: it is not packed, or must be unpacked.

        The caller counts it as loaded.
        """
        stored: PackedTensor | QuantizedTensor | None = self._checkpoint.quantized(name)
        if isinstance(self._checkpoint, HfCheckpoint):
            stored = self._checkpoint.packed_tensor(name)
        if stored is None:
            return None
        self.check_shape(name, stored.shape)
        if isinstance(stored, Fp8Tensor):  # NaN has all bits set except the sign; there is no infinity
            self.check_finite(name, not bool((stored.values.view(torch.uint8) & 127 == 127).any()))
        return stored

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield a matrix in float32, in pieces of whole panels of rows; check it, and count it at the end."""
        expected = self._shapes[name]
        pieces, rows_read = self._checkpoint.pieces(name, torch.float32, piece_rows(expected[-1])), 0
        for piece in pieces:
            rows_read += len(piece)
            if rows_read > expected[0] or piece.shape[1:] != expected[1:]:
                self.check_shape(name, (rows_read + sum(map(len, pieces)), *piece.shape[1:]))
            self.check_finite(name, bool(piece.sum(dtype=torch.float32).isfinite()))
            yield piece
            self._checkpoint.release()
        self.check_shape(name, (rows_read, *expected[1:]))
        self.count()

    def has(self, name: str) -> bool:
        """Return whether a model of this config has the tensor."""
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def _load(self, name: str, dtype: torch.dtype) -> Tensor:
        loaded = self._checkpoint.load(name, dtype).to(self._device)
        self.check_shape(name, tuple(loaded.shape))
        self.check_finite(name, bool(loaded.sum(dtype=torch.float32).isfinite()))
        self.count()
        return loaded

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if shape != self._shapes[name]:
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name} has shape {shape}, "
                f"its config says {self._shapes[name]}; get the files again"
            )

    def check_finite(self, name: str, is_finite: bool) -> None:
        if not is_finite:
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name} holds NaN or infinity; the file is damaged, get it again"
            )

    def count(self) -> None:
        """Count one loaded tensor and release its file pages; raise if loading was cancelled."""
        check_cancelled()
        self._checkpoint.release()
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self._shapes))
