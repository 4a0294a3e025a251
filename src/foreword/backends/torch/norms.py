"""Norms in plain torch, and the exchange between ranks on which their means depend."""

from typing import Protocol

import torch
from torch import Tensor


class Exchange(Protocol):
    """Combines numbers of all ranks. Every rank gets the same bits."""

    def total(self, part: Tensor) -> Tensor:
        """Return the sum over ranks, added in rank order."""

    def mean(self, part: Tensor) -> Tensor:
        """Return the mean over the columns of all ranks, float32 [rows, 1]. Ranks have equally many columns."""


class _SingleRank:
    """The exchange of a decoder that runs on one rank."""

    def total(self, part: Tensor) -> Tensor:
        return part

    def mean(self, part: Tensor) -> Tensor:
        return part.mean(-1, keepdim=True)


SINGLE_RANK: Exchange = _SingleRank()


def rms_norm(x: Tensor, weight: Tensor, eps: float, exchange: Exchange = SINGLE_RANK) -> Tensor:
    """Scale every row to unit root-mean-square, then by `weight`; the mean is taken in float32.

    With an `exchange`, the columns of a row are divided between ranks.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(exchange.mean(wide.pow(2)) + eps)
    return weight * scaled.to(x.dtype)
