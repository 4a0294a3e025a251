"""Log-probabilities for users: of the raw model, before temperature and corrections, as in OpenAI's API.

Under a grammar they are normalised over the allowed tokens, as in vLLM.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement, Verdicts
from foreword.acceptance.rules.chains import ONE
from foreword.acceptance.rules.trees import Floats, Ints

ROWS_AT_ONCE = 16
"""Rows per group, which bounds the memory of float64 copies of a long prompt's logits."""


@dataclass(frozen=True)
class TokenLogprobs:
    """A committed token's log-probability, and those of the most likely alternatives."""

    token: int
    logprob: float
    rank: int  # 1: the most likely token
    top_ids: Ints  # [alternatives], most likely first
    top_logprobs: Floats  # [alternatives]


def request_logprobs(judged: Judgement, verdicts: Verdicts, request: int) -> list[TokenLogprobs]:
    """Return one entry per committed token of a request, in order; empty if none are requested."""
    wanted = judged.logprobs[request]
    if wanted < 0:
        return []
    root, tokens = judged.trees.starts[request], verdicts.tokens(judged.trees, request)
    rows = [root, *(root + 1 + node for node in verdicts.paths[request])]
    # A failed request has no own token after the last row.
    return score(judged.logits[rows[: len(tokens)]], tokens, wanted)


def score(logits: Tensor, next_tokens: Sequence[int], wanted: int) -> list[TokenLogprobs]:
    """Return the log-softmax of each row of logits [rows, vocab] at its next token, and at the `wanted` largest."""
    scored: list[TokenLogprobs] = []
    for start in range(0, len(next_tokens), ROWS_AT_ONCE):
        group = slice(start, start + ROWS_AT_ONCE)
        scored += _score_group(logits[group], next_tokens[group], wanted)
    return scored


def _score_group(logits: Tensor, tokens: Sequence[int], wanted: int) -> list[TokenLogprobs]:
    normaliser = log_normalisers(logits)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    top = logits.topk(wanted, dim=-1)
    values = (top.values.double() - normaliser[:, None]).cpu().numpy()
    ids, possible = top.indices.cpu().numpy(), values > -math.inf  # a grammar may leave fewer than wanted
    found = zip(
        tokens,
        (chosen[:, 0].double() - normaliser).tolist(),
        ((logits > chosen).sum(dim=-1) + 1).tolist(),
        (row[kept] for row, kept in zip(ids, possible, strict=True)),
        (row[kept] for row, kept in zip(values, possible, strict=True)),
        strict=True,
    )
    return [TokenLogprobs(*columns) for columns in found]


def log_normalisers(logits: Tensor) -> Tensor:
    """float64 [rows], log-sum-exp, summed in 80-bit fixed point: independent of order and batch."""
    peak = logits.amax(dim=-1).double()
    scaled = (logits.double() - peak[:, None]).exp_().mul_(ONE)
    high = scaled.floor()
    low = scaled.sub_(high).mul_(ONE).round_()
    sums = [part.long().sum(dim=-1).double() for part in (high, low)]
    return peak + ((sums[0] + sums[1] / ONE) / ONE).log()
