"""What grammars allow after every row: with the request's own history, then the draft nodes up to the row."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.pipeline.upload import uploaded
from foreword.acceptance.request import RequestSampler
from foreword.acceptance.rules.trees import DraftTrees
from foreword.structured.state import Bits, unpacked

NEVER = -float("inf")


def row_mask(trees: DraftTrees, samplers: Sequence[RequestSampler], logits: Tensor) -> Tensor | None:
    """bool [rows, vocab] where the logits are; None if no request has a grammar.

    Worked out on the host: where the logits are still being computed on a device, nobody waits for them here.
    """
    if all(sampler.grammar is None for sampler in samplers):
        return None
    mask = torch.ones(logits.shape, dtype=torch.bool)
    for request, sampler in enumerate(samplers):
        if sampler.grammar is None:
            continue
        first, end = trees.starts[request], trees.starts[request + 1]
        parents = [parent - first - 1 for parent in trees.parent_list[first + 1 : end]]
        bits: Bits = sampler.grammar.masks(trees.token_list[first + 1 : end], parents)
        allowed = torch.from_numpy(unpacked(bits, sampler.vocab_size))
        mask[first:end, : sampler.vocab_size] = allowed
    return uploaded(mask, logits.device)


def apply_mask(logits: Tensor, mask: Tensor) -> Tensor:
    """A copy in which the tokens that the mask leaves out have no chance."""
    if logits.device.type != "cpu":
        return torch.where(mask, logits, NEVER)
    # Most rows allow a few tokens or all but a few: to write those takes a third of the time of looking at each.
    masked = torch.empty(logits.shape)
    for source, allowed, row in zip(logits.numpy(), mask.numpy(), masked.numpy(), strict=True):
        if 2 * np.count_nonzero(allowed) < len(allowed):
            kept = np.flatnonzero(allowed)
            row[:] = NEVER
            row[kept] = source[kept]
        else:
            row[:] = source
            row[np.flatnonzero(~allowed)] = NEVER
    return masked
