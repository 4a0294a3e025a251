"""A grammar that is nothing but its masks."""

import numpy as np
import torch

from foreword.structured.compiled import Bits


class MaskedRows:
    """Allows, after the text and after every node, what it is told."""

    error = None

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask.numpy()

    def masks(self, tokens, parents) -> Bits:
        assert len(self._mask) == 1 + len(tokens)
        wide = np.zeros((len(self._mask), -(-self._mask.shape[1] // 32) * 32), np.uint8)
        wide[:, : self._mask.shape[1]] = self._mask
        return np.packbits(wide, axis=1, bitorder="little").view(np.int32)

    def commit(self, tokens) -> None:
        """It stays where it is."""
