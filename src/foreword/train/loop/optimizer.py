"""Optimisers, and the length and learning rate of a training phase."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class TrainPhase:
    """Length and learning rate of a training phase; only the rate of a final phase decays."""

    seconds: float | None = None
    last_step: int | None = None
    final: bool = False
    decay_share: float = 0.4  # fraction of the phase with a decaying rate
    clock: Callable[[], float] = time.monotonic
    first_step: int = 0
    stop: Callable[[], bool] = lambda: False  # returns whether to end before the next step
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self.clock()

    def is_over(self, step: int) -> bool:
        return self.stop() or self.done(step) >= 1.0

    def rate(self, step: int) -> float:
        """Return the learning-rate factor of the next step."""
        if not self.final:
            return 1.0
        return max(0.02, min(1.0, (1.0 - self.done(step)) / self.decay_share))

    def done(self, step: int) -> float:
        """Return the completed fraction, by time or by steps, whichever is larger."""
        shares = [0.0]
        if self.seconds is not None:
            shares.append((self.clock() - self._begin) / max(self.seconds, 1e-9))
        if self.last_step is not None:
            length = self.last_step - self.first_step
            shares.append((step - self.first_step) / length if length > 0 else 1.0)
        return max(shares)


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration


@dataclass(frozen=True)
class LearningRates:
    """Learning rates of Muon and AdamW."""

    muon: float = 0.02
    adam: float = 1e-3


class HeadOptimizer:
    """Muon for matrices and AdamW for other parameters, with one learning-rate factor for warm-up and decay."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], rates: LearningRates) -> None:
        self._matrices = list(matrices)
        self._rates = rates
        self._momentum = [torch.zeros_like(matrix) for matrix in matrices]
        fused = all(tensor.is_cuda for tensor in others)
        self._adam = torch.optim.AdamW(
            list(others), lr=rates.adam, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
        )
        self._all = [*matrices, *others]

    def clip(self, norm: float) -> Tensor:
        """Clip all gradients to a norm; return their norm before."""
        before: Tensor = torch.nn.utils.clip_grad_norm_(self._all, norm)
        return before

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply the gradients, with learning rates times `factor`, and reset them."""
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
    """Return approximately the nearest matrix with equal singular values (Newton-Schulz iteration)."""
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
