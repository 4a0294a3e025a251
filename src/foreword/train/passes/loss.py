"""Computes the cross-entropy with the target's distribution over a large vocabulary, without storing all logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from foreword.train.passes.target import FrozenTarget

CHUNK = 4096  # number of rows whose logits exist at the same time

RowLosses = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""The type of `row_losses`, which may be compiled."""


def row_losses(
    logits: Tensor, wanted: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's weighted loss, the gradient of its logits, and whether its most likely token is its label.

    `wanted` are the target's probabilities [rows, vocabulary].
    """
    wide = logits.float()
    logsumexp = wide.logsumexp(-1, keepdim=True)
    wanted = wanted.float()
    loss = (logsumexp.squeeze(-1) - (wanted * wide).sum(-1)) * weights
    gradient = ((wide - logsumexp).exp() - wanted) * weights.unsqueeze(-1)
    return loss, gradient.to(logits.dtype), wide.argmax(-1) == labels


class OutputLoss(torch.autograd.Function):
    """Computes the total loss of states [rows, hidden], and whether each state's most likely token is its label.

    The forward pass computes the gradients too, while the logits exist; the backward pass only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        states: Tensor,
        matrix: Tensor,
        wanted: Tensor,
        wanted_indices: Tensor,
        labels: Tensor,
        weights: Tensor,
        compute: RowLosses,
    ) -> tuple[Tensor, Tensor]:
        """Return the total loss, and whether each state's most likely token is its label.

        `wanted` are the target's probabilities [rows, vocabulary]; `wanted_indices` has each state's row of `wanted`.
        """
        cast = matrix.to(states.dtype)
        grad_states = torch.empty_like(states)
        learns = ctx.needs_input_grad[1]  # False: the head uses the target's output matrix, which is frozen
        grad_matrix = torch.zeros_like(matrix) if learns else None
        hits = torch.empty(len(states), dtype=torch.bool, device=states.device)
        total = torch.zeros((), device=states.device)
        for begin in range(0, len(states), CHUNK):
            part = slice(begin, begin + CHUNK)
            logits = linear(states[part], cast)
            loss, gradient, hits[part] = compute(
                logits, wanted[wanted_indices[part]], labels[part], weights[part]
            )
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
    target: FrozenTarget, final_states: Tensor, matrix: Tensor, sharpness: float = 1.0
) -> Tensor:
    """Return the target's probabilities over the draft vocabulary; sharpness above 1 favours likely tokens.

    `final_states` are the target's states after its final norm, `matrix` its output rows for the draft vocabulary.
    """
    out = torch.empty(len(final_states), len(matrix), dtype=final_states.dtype, device=final_states.device)
    for begin in range(0, len(final_states), CHUNK):
        part = slice(begin, begin + CHUNK)
        out[part] = (target.logits(final_states[part], matrix) * sharpness).softmax(-1)
    return out
