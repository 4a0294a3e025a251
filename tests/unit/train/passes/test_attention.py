"""Packed attention: against a loop over single queries, and the flash path's joining and gradients."""

import math

import pytest
import torch

from foreword.train.passes import attention
from foreword.train.passes.attention import (
    CacheRows,
    Spans,
    causal_attention,
    chain_attention,
    decode_attention,
)
from helpers.cuda import KERNEL_DEVICE, needs_triton

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTHS, TAILS = [5, 3, 7], [2, 3, 4]
CPU = torch.device("cpu")


def _tensors(steps: int = 2):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).requires_grad_()

    rows, tails = sum(LENGTHS), sum(TAILS)
    own = [(draw(tails, KV_HEADS, DIM), draw(tails, KV_HEADS, DIM)) for _ in range(steps)]
    return draw(tails, HEADS, DIM), draw(rows, KV_HEADS, DIM), draw(rows, KV_HEADS, DIM), own


def _naive(q, k, v, own, window=100):
    """Every query by itself: the newest keys of its text up to its own place, then its own ones."""
    out = torch.empty_like(q)
    row = 0
    begin = 0
    for length, tail in zip(LENGTHS, TAILS, strict=True):
        for place in range(length - tail, length):
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                seen = slice(begin + max(0, place + 1 - window), begin + place + 1)
                keys = torch.cat((k[seen, kv], *[key[row : row + 1, kv] for key, _ in own]))
                values = torch.cat((v[seen, kv], *[value[row : row + 1, kv] for _, value in own]))
                weights = (keys @ q[row, head] / math.sqrt(DIM)).softmax(0)
                out[row, head] = weights @ values
            row += 1
        begin += length
    return out


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_chain_attention_is_what_each_query_sees_by_itself(steps: int, window: int | None):
    q, k, v, own = _tensors(steps)
    spans = Spans.of(TAILS, CPU), Spans.of(LENGTHS, CPU)
    expected = _naive(q, k, v, own, window or 100)
    torch.testing.assert_close(chain_attention(q, k, v, own, *spans, window), expected)


def test_joining_own_keys_to_a_finished_past_gives_the_same_output_and_gradients():
    q, k, v, own = _tensors()
    queries, keys = Spans.of(TAILS, CPU), Spans.of(LENGTHS, CPU)
    whole = chain_attention(q, k, v, own, queries, keys)
    gradient = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(whole, [q, *[tensor for pair in own for tensor in pair]], gradient)

    own_keys = torch.stack([key for key, _ in own], dim=2).detach()
    own_values = torch.stack([value for _, value in own], dim=2).detach()
    scores = attention._dense_scores(q.detach(), k.detach(), queries, keys)
    past, logsumexp = causal_attention(q, k, v, queries, keys).detach(), scores.logsumexp(-1)
    out, joined = attention._join(q.detach(), past, logsumexp, own_keys, own_values)
    torch.testing.assert_close(out, whole)
    more_q, grad_keys, grad_values = attention._chain_backward(
        q.detach(), own_keys, own_values, out, joined, gradient
    )
    # The past's share of the gradient, as the kernel makes it of the joined output and sum.
    weights = (scores - joined.unsqueeze(-1)).exp()
    delta = (gradient * out).sum(-1)
    grad_weights = torch.einsum("rhd,chd->hrc", gradient, v.repeat_interleave(HEADS // KV_HEADS, 1))
    grad_scores = weights * (grad_weights - delta.t().unsqueeze(-1)) / math.sqrt(DIM)
    grad_q = torch.einsum("hrc,chd->rhd", grad_scores, k.repeat_interleave(HEADS // KV_HEADS, 1))
    torch.testing.assert_close(grad_q + more_q, wanted[0])
    for step in range(2):
        torch.testing.assert_close(grad_keys[:, :, step], wanted[1 + 2 * step])
        torch.testing.assert_close(grad_values[:, :, step], wanted[2 + 2 * step])


def test_decoding_reads_only_what_a_row_has():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, HEADS, DIM, generator=generator)
    k, v = torch.randn(2, 2, 6, KV_HEADS, DIM, generator=generator)
    lengths = torch.tensor([3, 6])
    out = decode_attention(q, k, v, CacheRows.of(lengths))
    for row, length in enumerate([3, 6]):
        one = Spans.of([1], CPU), Spans.of([length], CPU)
        torch.testing.assert_close(
            out[row : row + 1], causal_attention(q[row : row + 1], k[row, :length], v[row, :length], *one)
        )


@needs_triton
def test_the_engines_kernel_reads_a_static_cache_row_by_row():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, HEADS, 16, generator=generator)  # fewer numbers no tensor core takes
    k, v = torch.randn(2, 3, 150, KV_HEADS, 16, generator=generator)
    rows = CacheRows.of(torch.tensor([1, 70, 150]))
    wanted = decode_attention(q, k, v, rows)
    given = [tensor.to(KERNEL_DEVICE) for tensor in (q, k, v)]
    got = attention._paged(*given, CacheRows.of(rows.lengths.to(KERNEL_DEVICE)))
    torch.testing.assert_close(got.cpu(), wanted, rtol=5e-3, atol=5e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 3])
def test_flash_kernels_agree_with_the_dense_form(window: int | None):
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    rows, tails = sum(LENGTHS), sum(TAILS)
    shapes = [(tails, HEADS), (rows, KV_HEADS), (rows, KV_HEADS)] + [(tails, KV_HEADS)] * 4
    host = [torch.randn(*shape, 64, generator=generator).bfloat16().float() for shape in shapes]
    results = []
    for place, dtype in ((CPU, torch.float32), (device, torch.bfloat16)):
        # A copy for each: what needs gradients on the host would get those of the device as well.
        tensors = [tensor.to(place, dtype, copy=True).requires_grad_() for tensor in host]
        q, k, v, *rest = tensors
        own = [(rest[0], rest[1]), (rest[2], rest[3])]
        out = chain_attention(q, k, v, own, Spans.of(TAILS, place), Spans.of(LENGTHS, place), window)
        out.backward(torch.ones_like(out) * torch.arange(64, device=place) / 64)
        results.append([out.detach(), *[tensor.grad for tensor in tensors]])
    names = ("out", "q", "k", "v", "own keys 1", "own values 1", "own keys 2", "own values 2")
    for name, wanted, got in zip(names, *results, strict=True):
        assert (got.cpu().float() - wanted).norm() / wanted.norm() < 2e-2, name
    q, k, v = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((3, HEADS, 64), *[(3, 32, KV_HEADS, 64)] * 2)
    )
    lengths = torch.tensor([1, 17, 32], dtype=torch.int32)
    wanted = decode_attention(q.float(), k.float(), v.float(), CacheRows.of(lengths))
    rows = CacheRows.of(lengths.to(device))
    got = decode_attention(*(tensor.to(device) for tensor in (q, k, v)), rows).cpu().float()
    assert (got - wanted).norm() / wanted.norm() < 2e-2
