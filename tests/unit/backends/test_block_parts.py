"""Convolutions stay within a block, and the selector leaves the best candidates alone."""

import numpy as np
import torch

from foreword.backends.torch.block_parts import block_indices, candidate_logits, convolve
from foreword.models.heads.spec import PathSelector


def test_a_row_of_a_block_does_not_depend_on_the_block_before():
    rows, channels, taps = 7, 4, 3
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, channels, generator=generator)
    weights = torch.randn(rows, 2, taps, channels, generator=generator)
    indices = torch.from_numpy(block_indices(np.array([0, 3, 7], np.int32)))
    assert indices.tolist() == [0, 1, 2, 0, 1, 2, 3]
    both = convolve(x, weights, 1, indices)
    alone = convolve(x[3:], weights[3:], 1, indices[3:])
    assert torch.equal(both[3:], alone)
    expected = weights[5, 1, 0] * x[5] + weights[5, 1, 1] * x[4] + weights[5, 1, 2] * x[3]
    torch.testing.assert_close(both[5], expected)


def test_only_candidates_are_left():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    vectors = torch.tensor([[0.0], [0.0], [4.0], [100.0]])
    chosen = candidate_logits(
        PathSelector(candidates=2, logit_scale=2.0),
        logits,
        torch.tensor([[0.5]]),
        torch.tensor([[3.0]]),
        lambda candidates: vectors[candidates],
    )
    assert chosen.tolist() == [[-torch.inf, 6.0, 4.0 + 0.5 * 3.0 * 4.0, -torch.inf]]
