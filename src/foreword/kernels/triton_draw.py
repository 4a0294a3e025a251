"""Sampling on a GPU. Three kernels find a row's peak, add noise and choose the best token, reading the logits twice.

The reference is `acceptance.distribution.best_of_all`. The noise integers are equal; the logarithms
round as the GPU does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.launching import kernel
from foreword.kernels.recording import is_recording

_CHUNK = 4096
"""Tokens per program: several programs read one row of a large vocabulary."""

_OK: tl.constexpr = tl.constexpr(0)
_NOT_FINITE: tl.constexpr = tl.constexpr(1)
_ALL_MASKED: tl.constexpr = tl.constexpr(2)
"""The values of `acceptance.batch.RowStatus`."""


@triton.jit
def _log1p(x):
    """Return log(1 + x) for doubles with -1/2 <= x <= 0, correcting the rounding of 1 + x."""
    rounded = 1.0 + x
    return tl.where(rounded == 1.0, x, tl.log(rounded) * (x / (rounded - 1.0)))


@triton.jit
def _gumbel(keys, tokens):
    """Return the Gumbel noise of tokens; the reference is `acceptance.noise.gumbel`."""
    z = keys.to(tl.uint64, bitcast=True) + (tokens + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    units = ((z >> 10) | 1).to(tl.int64)
    half: tl.constexpr = 1 << 53
    is_lower_half = units < half
    tail = tl.where(is_lower_half, units, 2 * half - units).to(tl.float64) * (2.0**-54)
    exponential = -tl.where(is_lower_half, tl.log(tail), _log1p(-tail))
    return -tl.log(exponential)


@kernel()
def _peak_of_chunk(logits, peaks, firsts, vocab, stride, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest logit of a chunk and its first token; infinity if any logit is not finite."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    winner = tl.full((BLOCK,), vocab, dtype=tl.int32)
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        logit = tl.where(logit <= float("inf"), logit, float("inf"))
        winner = tl.where(logit > best, token, winner)  # ties keep the first
        best = tl.maximum(best, logit)
    highest = tl.max(best, axis=0)
    tl.store(peaks + row * chunks + chunk, highest)
    tl.store(firsts + row * chunks + chunk, tl.min(tl.where(best == highest, winner, vocab), axis=0))


@kernel()
def _best_of_chunk(
    logits, peaks, floors, temperatures, keys, token_ids, scores, winners, vocab, stride, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    HAS_FLOORS: tl.constexpr, HAS_TOKEN_IDS: tl.constexpr,
):  # fmt: skip
    """Find the kept token with the largest score in a chunk, unless the row is greedy."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, CHUNKS)
    peak = tl.max(tl.load(peaks + row * chunks + index, mask=index < chunks, other=-float("inf")), axis=0)
    temperature, key = tl.load(temperatures + row), tl.load(keys + row)
    best = tl.full((BLOCK,), -float("inf"), dtype=tl.float64)
    winner = tl.full((BLOCK,), vocab, dtype=tl.int64)
    if (temperature > 0) & (peak > -float("inf")) & (peak < float("inf")):
        floor = tl.load(floors + row) if HAS_FLOORS else -3.4028234663852886e38
        for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), BLOCK):
            token = start + tl.arange(0, BLOCK).to(tl.int64)
            logit = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf")).to(
                tl.float32
            )
            distance = logit.to(tl.float64) - peak.to(tl.float64)
            token_id = tl.load(token_ids + token, mask=token < vocab, other=0) if HAS_TOKEN_IDS else token
            score = distance / temperature + _gumbel(key + tl.zeros_like(token), token_id)
            score = tl.where(logit >= floor, score, -float("inf"))
            winner = tl.where(score > best, token, winner)  # ties keep the first
            best = tl.maximum(best, score)
    highest = tl.max(best, axis=0)
    tl.store(scores + row * chunks + chunk, highest)
    tl.store(winners + row * chunks + chunk, tl.min(tl.where(best == highest, winner, vocab), axis=0))


@kernel(do_not_specialize=("rows",))
def _choose(
    peaks, firsts, temperatures, scores, winners, token_ids, drawn, rows, chunks, vocab,
    CHUNKS: tl.constexpr, SAMPLES: tl.constexpr, HAS_TOKEN_IDS: tl.constexpr,
):  # fmt: skip
    """Combine a row's chunks into its token and status."""
    row = tl.program_id(0).to(tl.int64)
    index = row * chunks + tl.arange(0, CHUNKS)
    is_chunk = tl.arange(0, CHUNKS) < chunks
    chunk_peaks = tl.load(peaks + index, mask=is_chunk, other=-float("inf"))
    peak = tl.max(chunk_peaks, axis=0)
    first = tl.load(firsts + index, mask=is_chunk, other=vocab)
    token = tl.min(tl.where(chunk_peaks == peak, first, vocab), axis=0).to(tl.int64)
    if SAMPLES:
        score = tl.load(scores + index, mask=is_chunk, other=-float("inf"))
        winner = tl.load(winners + index, mask=is_chunk, other=vocab)
        sampled = tl.min(tl.where(score == tl.max(score, axis=0), winner, vocab), axis=0)
        token = tl.where(tl.load(temperatures + row) > 0, sampled, token)
    status = tl.where(peak == float("inf"), _NOT_FINITE, tl.where(peak == -float("inf"), _ALL_MASKED, _OK))
    is_drawn = (status == _OK) & (token < vocab)
    if HAS_TOKEN_IDS:
        token = tl.load(token_ids + token, mask=is_drawn, other=-1)
    tl.store(drawn + row, tl.where(is_drawn, token, -1))
    tl.store(drawn + rows + row, status.to(tl.int64))


def draw_rows(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    floor: Tensor | None,
    *,
    samples: bool = True,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Return each row's sampled token (-1: none was sampled) and its `RowStatus`, int64 [2, rows].

    The sampled token is the kept token with the largest (logit - peak) / temperature + noise; at temperature 0, the
    first argmax. Without a floor all tokens are kept; without `samples` every temperature is 0.

    logits [rows, vocab]; floor float32, temperature float64 and keys int64 [rows]. `token_ids` int64 [vocab] are ids of
    the columns, which determine the noise and are returned; None: 0, 1, and so on.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    block = triton.next_power_of_2(chunks)
    peaks = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    firsts = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    drawn = torch.empty((2, rows), dtype=torch.int64, device=logits.device)
    if is_recording():
        drawn.zero_()  # kernels do not run, and callers may use the tokens as indices
    scores = winners = drawn  # unused unless `samples`
    _peak_of_chunk[(rows, chunks)](
        logits, peaks, firsts, vocab, logits.stride(0), chunks, CHUNK=_CHUNK, BLOCK=1024
    )
    if samples:
        scores = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
        winners = torch.empty((rows, chunks), dtype=torch.int64, device=logits.device)
        _best_of_chunk[(rows, chunks)](
            logits, peaks, peaks if floor is None else floor, temperature, keys,
            keys if token_ids is None else token_ids, scores, winners, vocab, logits.stride(0), chunks,
            CHUNK=_CHUNK, BLOCK=1024, CHUNKS=block,
            HAS_FLOORS=floor is not None, HAS_TOKEN_IDS=token_ids is not None,
        )  # fmt: skip
    _choose[(rows,)](
        peaks, firsts, temperature, scores, winners, drawn if token_ids is None else token_ids, drawn, rows, chunks,
        vocab, CHUNKS=block, SAMPLES=samples, HAS_TOKEN_IDS=token_ids is not None,
    )  # fmt: skip
    return drawn
