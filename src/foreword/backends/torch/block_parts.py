"""DFlash2's additions to a block head: convolutions over the rows of a block, and the choice among candidates."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import Ints
from foreword.models.heads.spec import PathSelector


def block_indices(row_starts: Ints) -> Ints:
    """Return each row's index in its block, int32 [rows]; `row_starts` [blocks + 1] has the first row of each."""
    rows = np.arange(row_starts[-1], dtype=np.int32)
    return rows - np.repeat(row_starts[:-1], np.diff(row_starts))


def convolve(x: Tensor, weights: Tensor | None, side: int, indices: Tensor | None, stride: int = 1) -> Tensor:
    """Return the sum of each row and the rows before it in its block, each times its weights.

    `x` is [rows, channels]; `weights` [rows, 2, taps, channels] has those of a module's input (side 0) and output (1);
    None: return x. `indices` [rows] are the places of rows in their blocks, whose rows are `stride` apart. The first
    tap is the row itself.
    """
    if weights is None or indices is None:
        return x
    result = weights[:, side, 0] * x
    for tap in range(1, weights.shape[2]):
        is_in_block = (indices >= tap).unsqueeze(-1)
        result = result + torch.where(is_in_block, weights[:, side, tap] * x.roll(tap * stride, 0), 0.0)
    return result.to(x.dtype)


def convolution_weights(base: Tensor, generated: Tensor) -> Tensor:
    """Return the weights of a module's convolutions, float32 [rows, 2, taps, channels]: for its input and output.

    `base` is [2, taps, channels]. `generated` [rows, 2 * taps * groups] is added, one number per group of channels.
    """
    by_group = generated.float().view(len(generated), *base.shape[:2], -1)
    return base + by_group.repeat_interleave(base.shape[-1] // by_group.shape[-1], dim=-1)


def candidate_logits(
    selector: PathSelector,
    logits: Tensor,
    previous: Tensor,
    projected: Tensor,
    vectors_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the selector's logits, -inf for all tokens but the candidates: float32 [positions, draft vocabulary].

    Candidates are the tokens with the highest `logits` of a position. Each gets a bonus: the sum of products of the
    vectors of the token before the position (`previous`), of the position (`projected`, both [positions, rank]) and of
    the candidate (`vectors_of` candidates [positions, candidates] has one more dimension).
    """
    best, candidates = logits.float().topk(min(selector.candidates, logits.shape[-1]), dim=-1)
    best = best * selector.logit_scale
    if selector.logit_cap is not None:
        best = selector.logit_cap * torch.tanh(best / selector.logit_cap)
    pair = previous.float() * projected.float()
    bonus = torch.einsum("pr,pcr->pc", pair, vectors_of(candidates).float())
    return torch.full_like(logits, -torch.inf, dtype=torch.float32).scatter(-1, candidates, best + bonus)
