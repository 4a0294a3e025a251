"""Drawing on a GPU: noise, score and the largest of them in one reading of the logits.

`acceptance.draw.best_of_all` is what it must equal. The integers of the noise are the same; the logarithms round as
this device's do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096
"""Tokens of one program: a row of a large vocabulary is read by many."""


@triton.jit
def _log1p(x):
    """log(1 + x) for doubles with -1/2 <= x <= 0: the rounding of 1 + x is undone."""
    whole = 1.0 + x
    return tl.where(whole == 1.0, x, tl.log(whole) * (x / (whole - 1.0)))


@triton.jit
def _gumbel(keys, tokens):
    """The noise of `acceptance.noise.gumbel`."""
    z = keys.to(tl.uint64, bitcast=True) + (tokens + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    units = ((z >> 10) | 1).to(tl.int64)
    half: tl.constexpr = 1 << 53
    lower = units < half
    tail = tl.where(lower, units, 2 * half - units).to(tl.float64) * (2.0**-54)
    exponential = -tl.where(lower, tl.log(tail), _log1p(-tail))
    return -tl.log(exponential)


@triton.jit
def _best_of_chunk(
    logits, peaks, floors, temperatures, keys, scores, ids, vocab, stride, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = tl.load(peaks + row).to(tl.float64)
    floor, temperature, key = tl.load(floors + row), tl.load(temperatures + row), tl.load(keys + row)
    best = tl.full((BLOCK,), -float("inf"), dtype=tl.float64)
    winner = tl.full((BLOCK,), vocab, dtype=tl.int64)
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), BLOCK):
        token = start + tl.arange(0, BLOCK).to(tl.int64)
        logit = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf"))
        kept = (logit >= floor) & (logit < float("inf"))
        score = (logit.to(tl.float64) - peak) / temperature + _gumbel(key + tl.zeros_like(token), token)
        score = tl.where(kept, score, -float("inf"))
        winner = tl.where(score > best, token, winner)  # the first of equals stays
        best = tl.maximum(best, score)
    highest = tl.max(best, axis=0)
    tl.store(scores + row * chunks + chunk, highest)
    tl.store(ids + row * chunks + chunk, tl.min(tl.where(best == highest, winner, vocab), axis=0))


@triton.jit
def _best_of_chunks(scores, ids, tokens, chunks, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    score = tl.load(scores + row * chunks + place, mask=place < chunks, other=-float("inf"))
    winner = tl.load(ids + row * chunks + place, mask=place < chunks, other=vocab)
    highest = tl.max(score, axis=0)
    token = tl.min(tl.where((score == highest) & (score > -float("inf")), winner, vocab), axis=0)
    tl.store(tokens + row, tl.where(token < vocab, token, -1))


def draw_largest(logits: Tensor, peak: Tensor, floor: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """int64 [rows], the kept token of largest (logit - peak) / temperature + noise; -1 where none is kept.

    logits float32 [rows, vocab]; peak, floor float32 and temperature float64 and keys int64 [rows].
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    scores = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
    ids = torch.empty((rows, chunks), dtype=torch.int64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _best_of_chunk[(rows, chunks)](
        logits, peak, floor, temperature, keys, scores, ids, vocab, logits.stride(0), chunks,
        CHUNK=_CHUNK, BLOCK=1024,
    )  # fmt: skip
    _best_of_chunks[(rows,)](scores, ids, tokens, chunks, vocab, BLOCK=triton.next_power_of_2(chunks))
    return tokens
