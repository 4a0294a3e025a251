"""The draw on a GPU equals the one written in torch; interpreted where there is no GPU."""

import pytest
import torch

from foreword.acceptance.draw import best_of_all
from foreword.acceptance.pipeline.distribution import Distributions
from foreword.acceptance.rules.trees import NO_TOKEN
from helpers.cuda import KERNEL_DEVICE, needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("vocab", [7, 1000, 9001])
def test_the_same_token_as_torch(vocab: int):
    from foreword.kernels.triton_draw import draw_largest

    generator = torch.Generator().manual_seed(vocab)
    rows = 12
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    logits[3, vocab // 2] = -torch.inf
    logits[4] = -torch.inf
    logits[5] = 1.0  # all equal: the noise alone decides
    peak = logits.amax(dim=1)
    floor = torch.where(torch.arange(rows) % 2 == 0, peak - 2.0, torch.finfo(torch.float32).min)
    floor[6], peak[4] = torch.inf, 0.0
    temperature = torch.linspace(0.3, 2.0, rows, dtype=torch.float64)
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    only = torch.full((rows,), NO_TOKEN)
    columns = [column.to(KERNEL_DEVICE) for column in (logits, peak, floor, temperature, keys)]
    shaped = Distributions(*columns[:4], only.to(KERNEL_DEVICE), only.to(KERNEL_DEVICE))
    expected = best_of_all(shaped, columns[4])
    found = draw_largest(*columns)
    assert expected[4] == expected[6] == NO_TOKEN
    assert found.tolist() == expected.tolist()
