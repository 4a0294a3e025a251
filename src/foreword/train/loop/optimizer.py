"""Muon for matrices inside the head, AdamW for the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration


@dataclass(frozen=True)
class Rates:
    """How fast to learn."""

    muon: float = 0.02
    adam: float = 1e-3


class HeadOptimizer:
    """Both optimisers, with one learning-rate factor for warm-up and decay."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], rates: Rates) -> None:
        self._matrices = list(matrices)
        self._rates = rates
        self._momentum = [torch.zeros_like(matrix) for matrix in matrices]
        fused = all(tensor.is_cuda for tensor in others)
        self._adam = torch.optim.AdamW(
            list(others), lr=rates.adam, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
        )
        self._all = [*matrices, *others]

    def clip(self, norm: float) -> Tensor:
        """Scale all gradients down to a norm; the norm that they had."""
        before: Tensor = torch.nn.utils.clip_grad_norm_(self._all, norm)
        return before

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Move along the gradients, and forget them."""
        for matrix, momentum in zip(self._matrices, self._momentum, strict=True):
            if matrix.grad is None:
                continue
            momentum.lerp_(matrix.grad, 0.05)
            direction = matrix.grad.lerp(momentum, 0.95)
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.sub_(orthogonalized(direction) * (self._rates.muon * factor * scale))
        for group in self._adam.param_groups:
            group["lr"] = self._rates.adam * factor
        self._adam.step()
        for tensor in self._all:
            tensor.grad = None

    def state(self) -> dict[str, object]:
        return {"momentum": self._momentum, "adam": self._adam.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        saved = state["momentum"]
        assert isinstance(saved, list)
        for momentum, old in zip(self._momentum, saved, strict=True):
            momentum.copy_(old)
        adam = state["adam"]
        assert isinstance(adam, dict)
        self._adam.load_state_dict(adam)


def orthogonalized(matrix: Tensor, iterations: int = 5) -> Tensor:
    """About the nearest matrix whose singular values are all equal, by Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = (x.t() if tall else x).to(matrix.dtype)
    return found
