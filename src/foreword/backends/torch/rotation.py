"""Cosines and sines of a pass, for every rotary embedding of a decoder."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.models.config import AttentionSpec, LayerSpec, RopeSpec
from foreword.models.rope import frequencies

CosSin = tuple[Tensor, Tensor]


class Rotations:
    """Rotary frequencies of a decoder's layers."""

    def __init__(self, layers: Sequence[LayerSpec], rope: RopeSpec, device: torch.device) -> None:
        self._kinds = [_kind(layer.attention, rope) for layer in layers]
        self._frequencies = {
            kind: frequencies(*kind).to(device) for kind in dict.fromkeys(self._kinds) if kind is not None
        }

    def of(self, positions: Tensor, dtype: torch.dtype) -> list[CosSin | None]:
        """Return [rows, rotated numbers / 2] for every layer; None: no rotary embedding."""
        tables: dict[tuple[RopeSpec, int] | None, CosSin | None] = {None: None}
        for kind, own in self._frequencies.items():
            angles, magnitude = positions.unsqueeze(1).float() * own, kind[0].magnitude
            cos, sin = angles.cos(), angles.sin()
            if magnitude != 1:
                cos, sin = cos * magnitude, sin * magnitude
            tables[kind] = cos.to(dtype), sin.to(dtype)
        return [tables[kind] for kind in self._kinds]


def _kind(attention: AttentionSpec, rope: RopeSpec) -> tuple[RopeSpec, int] | None:
    """Return a layer's rotary embedding and number of rotated dimensions."""
    if not attention.is_rotated:
        return None
    return attention.rope or rope, attention.rotary_dim
