"""The draw on a GPU equals the one written in torch; interpreted where there is no GPU."""

import pytest
import torch

from foreword.acceptance.batch import RowStatus
from foreword.acceptance.distribution import Distributions, RowParams, best_of_all, shape_rows
from foreword.acceptance.noise import GAMMA, MIX_A, MIX_B, signed64
from foreword.acceptance.rules.trees import NO_TOKEN
from helpers.cuda import KERNEL_DEVICE, needs_triton

pytestmark = needs_triton

ROWS = 12
BROKEN = 7


def logits_of(vocab: int) -> torch.Tensor:
    logits = 3 * torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[3, vocab // 2] = -torch.inf
    logits[4] = -torch.inf
    logits[5] = 1.0  # all equal: the noise alone decides, or the first
    logits[BROKEN, vocab - 1] = torch.nan
    logits[8, 0] = torch.inf
    return logits


def on_device(*columns: torch.Tensor) -> list[torch.Tensor]:
    return [column.to(KERNEL_DEVICE) for column in columns]


@pytest.mark.parametrize("vocab", [7, 1000, 9001])
@pytest.mark.parametrize("top_k", [0, 3])
def test_the_same_tokens_and_states_as_torch(vocab: int, top_k: int):
    from foreword.kernels.triton_draw import draw_rows

    temperature = torch.linspace(0.3, 2.0, ROWS, dtype=torch.float64)
    temperature[1::3] = 0.0
    ones = torch.ones(ROWS, dtype=torch.float64)
    shape = RowParams(temperature, torch.full((ROWS,), top_k or vocab), ones, 0 * ones)
    keys = torch.randint(-(2**62), 2**62, (ROWS,), generator=torch.Generator().manual_seed(1))
    logits, there, noise = on_device(logits_of(vocab), temperature, keys)
    shaped = shape_rows(logits, shape, None)
    expected = best_of_all(shaped, noise)
    found = draw_rows(logits, there, noise, shaped.floor if top_k else None)
    assert found.tolist() == [expected.tolist(), shaped.status.tolist()]
    assert found[:, [4, BROKEN, 8]].tolist() == [
        [NO_TOKEN] * 3,
        [RowStatus.ALL_MASKED, RowStatus.NOT_FINITE, RowStatus.NOT_FINITE],
    ]


@pytest.mark.parametrize("vocab", [7, 9001])
def test_where_nothing_is_sampled_the_first_of_the_largest_is_taken(vocab: int):
    from foreword.kernels.triton_draw import draw_rows

    zeros = torch.zeros(ROWS, dtype=torch.float64)
    logits, temperature, keys = on_device(logits_of(vocab), zeros, torch.zeros(ROWS, dtype=torch.int64))
    ones = 1.0 + zeros
    shape = RowParams(zeros, torch.full((ROWS,), vocab), ones, zeros)
    shaped: Distributions = shape_rows(logits, shape, None)
    found = draw_rows(logits, temperature, keys, None, samples=False)
    assert found.tolist() == [shaped.greedy_token.tolist(), shaped.status.tolist()]


@pytest.mark.parametrize("samples", [True, False])
def test_names_decide_the_noise_and_the_tokens(samples: bool):
    """As if every other token of the larger vocabulary had no logit."""
    from foreword.kernels.triton_draw import draw_rows

    few, many = 40, 1000
    names = torch.randperm(many, generator=torch.Generator().manual_seed(2))[:few].sort().values
    temperature = torch.full((ROWS,), 1.3 if samples else 0.0, dtype=torch.float64)
    keys = torch.randint(-(2**62), 2**62, (ROWS,), generator=torch.Generator().manual_seed(1))
    logits = logits_of(few)
    wide = torch.full((ROWS, many), -torch.inf)
    wide[:, names] = logits
    narrow, among, there, noise, ids = on_device(logits, wide, temperature, keys, names)
    found = draw_rows(narrow, there, noise, None, samples=samples, token_ids=ids)
    assert found.tolist() == draw_rows(among, there, noise, None, samples=samples).tolist()


def key_for(word: int, token: int) -> int:
    """Return the key whose noise for `token` comes from this 64-bit word: the mix of `acceptance.noise` undone."""
    z = word
    for shift, factor in ((31, MIX_B), (27, MIX_A), (30, 1)):
        z ^= z >> shift ^ z >> 2 * shift
        z = z * pow(factor, -1, 1 << 64) % (1 << 64)
    return signed64((z - (token + 1) * GAMMA) % (1 << 64))


def test_the_upper_tail_of_the_noise_is_large_but_finite():
    """The largest noise is 54 log 2 = 37.4: it loses against a logit that is 60 higher and wins against one of 30."""
    from foreword.kernels.triton_draw import draw_rows

    logits = torch.tensor([[0.0, -torch.inf, 60.0], [0.0, -torch.inf, 30.0]])
    keys = torch.tensor([key_for(2**64 - 1, 0)] * 2)
    on = on_device(logits, torch.ones(2, dtype=torch.float64), keys)
    assert draw_rows(*on, None)[0].tolist() == [2, 0]


def test_rows_that_stand_apart_in_memory():
    """Logits whose vocabulary was cut."""
    from foreword.kernels.triton_draw import draw_rows

    wide, temperature, keys = on_device(
        logits_of(1000), torch.ones(ROWS, dtype=torch.float64), torch.arange(ROWS)
    )
    cut = wide[:, :800]
    assert torch.equal(
        draw_rows(cut, temperature, keys, None), draw_rows(cut.clone(), temperature, keys, None)
    )
