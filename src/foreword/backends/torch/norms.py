"""Norms in plain torch."""

import torch
from torch import Tensor

from foreword.backends.torch.exchange import ALONE, Exchange


def rms_norm(x: Tensor, weight: Tensor, eps: float, exchange: Exchange = ALONE) -> Tensor:
    """Scale every row to unit root-mean-square, then by `weight`; the mean is taken in float32.

    With an `exchange`, a row is divided between ranks.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(exchange.mean(wide.pow(2)) + eps)
    return weight * scaled.to(x.dtype)
