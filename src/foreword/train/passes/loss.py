"""Computes the cross-entropy against the target's distribution over a large vocabulary, without storing all logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from foreword.train.passes.target import FrozenTarget

CHUNK = 4096  # number of rows whose logits exist at the same time

Judge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""The type of `judge_rows`, which may be compiled."""


def judge_rows(
    logits: Tensor, wanted: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's weighted loss, the gradient of its logits, and whether its most likely token is the label.

    `wanted` are the target's probabilities [rows, vocabulary].
    """
    wide = logits.float()
    logsumexp = wide.logsumexp(-1, keepdim=True)
    wanted = wanted.float()
    loss = (logsumexp.squeeze(-1) - (wanted * wide).sum(-1)) * weights
    gradient = ((wide - logsumexp).exp() - wanted) * weights.unsqueeze(-1)
    return loss, gradient.to(logits.dtype), wide.argmax(-1) == labels


class OutputLoss(torch.autograd.Function):
    """Computes the total loss of states [rows, hidden], and whether each draft token is right.

    The forward pass computes the gradients too, while the logits exist; the backward pass only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        states: Tensor,
        matrix: Tensor,
        wanted: Tensor,
        wanted_rows: Tensor,
        labels: Tensor,
        weights: Tensor,
        judge: Judge,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and whether each draft token is right; `wanted_rows` has each state's row in `wanted`."""
        cast = matrix.to(states.dtype)
        grad_states = torch.empty_like(states)
        learns = ctx.needs_input_grad[1]  # the target's own output matrix is frozen
        grad_matrix = torch.zeros_like(matrix) if learns else None
        hits = torch.empty(len(states), dtype=torch.bool, device=states.device)
        total = torch.zeros((), device=states.device)
        for begin in range(0, len(states), CHUNK):
            part = slice(begin, begin + CHUNK)
            logits = linear(states[part], cast)
            loss, gradient, hits[part] = judge(logits, wanted[wanted_rows[part]], labels[part], weights[part])
            total += loss.sum()
            grad_states[part] = gradient @ cast
            if grad_matrix is not None:
                grad_matrix += gradient.t() @ states[part]
        ctx.save_for_backward(grad_states, grad_matrix)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        grad_states, grad_matrix = ctx.saved_tensors
        return grad_states * grad, None if grad_matrix is None else grad_matrix * grad, *[None] * 5


@torch.no_grad()
def target_probabilities(
    target: FrozenTarget, last: Tensor, matrix: Tensor, sharpness: float = 1.0
) -> Tensor:
    """Return the target's probabilities over the draft vocabulary; sharpness above 1 favours likely tokens."""
    out = torch.empty(len(last), len(matrix), dtype=last.dtype, device=last.device)
    for begin in range(0, len(last), CHUNK):
        part = slice(begin, begin + CHUNK)
        out[part] = (target.logits(last[part], matrix) * sharpness).softmax(-1)
    return out
