"""The native sampler: floors of rows, and draws. The torch code in `acceptance` is what it must equal."""

import importlib
from types import ModuleType

import torch
from torch import Tensor


def extension() -> ModuleType | None:
    """The compiled extension, or None where it was not built."""
    try:
        return importlib.import_module("foreword.kernels._native")
    except ImportError:
        return None


def available(logits: Tensor) -> bool:
    """Whether these rows can be taken natively: float32 on the CPU, each row in one piece."""
    fits = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
    return fits and extension() is not None


def floors(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Per row the largest logit (NaN if any is), the smallest kept one, and a greedy row's first largest id."""
    rows = len(logits)
    peak, floor, first = torch.empty(rows), torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    native = importlib.import_module("foreword.kernels._native")
    native.sampler_floors(
        *(t.numpy() for t in (logits, temperature, top_k, top_p, min_p, peak, floor, first))
    )
    return peak, floor, first


def draw(
    logits: Tensor, peak: Tensor, floor: Tensor, temperature: Tensor, only: Tensor, keys: Tensor
) -> Tensor:
    """int64 [rows], the token that each row draws with its key; -1 where it keeps none."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    native = importlib.import_module("foreword.kernels._native")
    native.sampler_draw(*(t.numpy() for t in (logits, peak, floor, temperature, only, keys, tokens)))
    return tokens
