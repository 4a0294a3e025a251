"""Drafts with the target's own weights, quantized to fewer bits."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.drafters.registry import DrafterResources, drawn_kind, tree_width
from foreword.models.formats.checkpoint import Checkpoint, DerivedCheckpoint, QuantizedTensor
from foreword.speculation.settings import DrafterSettings, Limit, setting

GROUP = 32  # weights per scale and minimum, as in GGUF's Q4_1


class LowBitCheckpoint(DerivedCheckpoint):
    """A checkpoint whose projections are quantized to `bits`; other tensors are unchanged.

    Quantized weights are Q4_1 blocks with 2**bits levels, which 4-bit kernels run directly.
    """

    def __init__(self, original: Checkpoint, bits: int) -> None:
        super().__init__(original)
        self.bits = bits

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Return the quantized blocks of a projection, or the stored blocks of any other tensor.

        None: a tensor that is stored as floats, or a projection whose rows are not whole groups.
        """
        if not is_projection(name):
            return self.original.quantized(name)
        weights = self.original.load(name, torch.float32).numpy()
        if weights.shape[1] % GROUP:
            return None
        return QuantizedTensor("Q4_1", pack_q4_1(*round_groups(weights, self.bits)), weights.shape)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor; of a projection, the values that its quantized blocks have."""
        return self._rounded(name, self.original.load(name, torch.float32), dtype)

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        """Yield the tensor in pieces of rows. Each piece can be quantized alone, since no group exceeds a row."""
        for piece in self.original.pieces(name, torch.float32, rows):
            yield self._rounded(name, piece, dtype)

    def _rounded(self, name: str, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a projection's weights after quantizing and dequantizing them; other tensors are unchanged."""
        if not is_projection(name) or weights.shape[1] % GROUP:
            return weights.to(dtype)
        levels, scale, minimum = round_groups(weights.numpy(), self.bits)
        values = levels * scale.astype(np.float32) + minimum.astype(np.float32)
        return torch.from_numpy(values.reshape(tuple(weights.shape))).to(dtype)


def is_projection(name: str) -> bool:
    """Return whether a tensor is a matrix inside a layer."""
    return name.endswith("_proj.weight")


def round_groups(
    weights: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Quantize [rows, columns] to 2**bits evenly spaced levels per group.

    Return levels [rows, groups, GROUP], and the scale and minimum of each group, [rows, groups, 1].
    """
    grouped = weights.reshape(weights.shape[0], -1, GROUP)
    minimum = grouped.min(-1, keepdims=True).astype(np.float16)
    max_level = 2**bits - 1
    scale = ((grouped.max(-1, keepdims=True) - minimum) / max_level).astype(np.float16)
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)
    levels = np.rint((grouped - minimum.astype(np.float32)) / divisor).clip(0, max_level)
    return levels.astype(np.uint8), scale, minimum


def pack_q4_1(
    levels: NDArray[np.uint8], scale: NDArray[np.float16], minimum: NDArray[np.float16]
) -> NDArray[np.uint8]:
    """Return GGUF blocks: scale, minimum, then 16 bytes with the group's first half in the low nibbles."""
    nibbles = levels[..., : GROUP // 2] | levels[..., GROUP // 2 :] << 4
    blocks = np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), nibbles], axis=-1)
    return np.ascontiguousarray(blocks.reshape(levels.shape[0], -1))


@dataclass(frozen=True)
class SelfQuantizedConfig(DrafterSettings):
    """Settings of the quantization."""

    bits: int = setting(
        4,
        "bits per weight; with 3 or 2 bits, fewer draft tokens are accepted and no time is saved",
        Limit("2, 3 or 4", lambda value: value in (2, 3, 4)),
    )
    tree_width: int = tree_width()


def build_self_quantized(config: SelfQuantizedConfig, resources: DrafterResources) -> AutoregressiveDrafter:
    """Create a drafter with a quantized copy of the target's layers; embedding, head and last norm are shared."""
    decoder = resources.target.beside(LowBitCheckpoint(resources.checkpoint, config.bits))
    size = DraftingSize(config.tree_width)
    return AutoregressiveDrafter(decoder, resources.vocab_size, size, decoder.layer_bytes)


KIND = drawn_kind(
    AutoregressiveDrafter, "the target's own weights in fewer bits", SelfQuantizedConfig, build_self_quantized
)
