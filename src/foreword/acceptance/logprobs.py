"""Log-probabilities in answers: those of the model before temperature and corrections, as in OpenAI's API.

Under a grammar they are normalised over the allowed tokens, as in vLLM.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement, Verdicts
from foreword.acceptance.distribution import FIXED_POINT_ONE
from foreword.acceptance.rules.trees import Floats, Ints

ROWS_AT_ONCE = 16
"""Rows per group, which bounds the memory of float64 copies of a long prompt's logits."""


@dataclass(frozen=True)
class TokenLogprobs:
    """A committed token's log-probability, and those of the most likely alternatives."""

    token: int
    logprob: float
    rank: int  # 1 + number of tokens that are more likely
    top_ids: Ints  # [alternatives], most likely first
    top_logprobs: Floats  # [alternatives]


def request_logprobs(judged: Judgement, verdicts: Verdicts, request: int) -> list[TokenLogprobs]:
    """Return one entry per committed token of a request, in order; empty if none are requested."""
    wanted = judged.logprobs[request]
    if wanted < 0:
        return []
    root, tokens = judged.trees.starts[request], verdicts.tokens(judged.trees, request)
    rows = [root, *(root + 1 + node for node in verdicts.paths[request])]
    # If the request failed, it commits no token after the last row.
    return score(judged.logits[rows[: len(tokens)]], tokens, wanted)


def score(logits: Tensor, next_tokens: Sequence[int], wanted: int) -> list[TokenLogprobs]:
    """Return, for each row of logits [rows, vocab], the log-probabilities of its next token and of alternatives.

    Alternatives are the `wanted` most likely tokens.
    """
    scored: list[TokenLogprobs] = []
    for start in range(0, len(next_tokens), ROWS_AT_ONCE):
        group = slice(start, start + ROWS_AT_ONCE)
        scored += _score_group(logits[group], next_tokens[group], wanted)
    return scored


def _score_group(logits: Tensor, tokens: Sequence[int], wanted: int) -> list[TokenLogprobs]:
    """Return the same as `score`, for a few rows."""
    normaliser = log_normalisers(logits)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    logprobs = (chosen[:, 0].double() - normaliser).tolist()
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist()
    top = logits.topk(wanted, dim=-1)
    top_logprobs = (top.values.double() - normaliser[:, None]).cpu().numpy()
    top_ids = top.indices.cpu().numpy()
    is_possible = top_logprobs > -math.inf  # a grammar may allow fewer than `wanted` tokens
    return [
        TokenLogprobs(
            token, logprob, rank, top_ids[row][is_possible[row]], top_logprobs[row][is_possible[row]]
        )
        for row, (token, logprob, rank) in enumerate(zip(tokens, logprobs, ranks, strict=True))
    ]


def log_normalisers(logits: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, float64 [rows].

    The sum is in 80-bit fixed point (two integers), so it depends neither on the order nor on the batch.
    """
    peak = logits.amax(dim=-1).double()
    scaled = (logits.double() - peak[:, None]).exp_().mul_(FIXED_POINT_ONE)
    high = scaled.floor()
    low = scaled.sub_(high).mul_(FIXED_POINT_ONE).round_()
    high_sum, low_sum = (part.long().sum(dim=-1).double() for part in (high, low))
    return peak + ((high_sum + low_sum / FIXED_POINT_ONE) / FIXED_POINT_ONE).log()
