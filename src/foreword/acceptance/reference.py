"""Slow reference of the sampling pipeline for a single row, in plain Python."""

import math
from collections.abc import Sequence, Set

import numpy as np

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import TokenLimits

WORD_MASK = (1 << 64) - 1


def mix(z: int) -> int:
    """Apply the hash function of `noise.mix`."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD_MASK
    return z ^ (z >> 31)


NEVER = -math.inf
"""Logit of a forbidden token."""


def probabilities(
    logits: Sequence[float],
    params: SamplingParams,
    limits: TokenLimits,
    prompt: Sequence[int],
    generated: Sequence[int],
    allowed: Set[int] | None = None,
) -> list[float]:
    """Return the distribution of the next token: the logits are corrected, then `shaped`.

    Corrections are bias, penalties, bad words, minimum length and allowed tokens. `prompt` and `generated` are the
    row's history; `allowed` are the grammar's tokens, None: all.
    """
    values = [float(value) for value in logits[: limits.vocab_size]]
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in {*prompt, *generated}:
        if 0 <= token < len(values):
            values[token] = penalised(values[token], params, list(generated).count(token))
    for token in forbidden(params, limits, [*prompt, *generated], len(generated)):
        values[token] = NEVER
    if allowed is not None:
        values = [value if token in allowed else NEVER for token, value in enumerate(values)]
    return shaped([float(np.float32(value)) for value in values], params)


def penalised(value: float, params: SamplingParams, times: int) -> float:
    """Return the logit of a token of the history after the three penalties.

    `times`: its count in the generated part.
    """
    value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    value -= params.frequency_penalty * times
    return value - (params.presence_penalty if times else 0.0)


def forbidden(params: SamplingParams, limits: TokenLimits, history: list[int], generated: int) -> set[int]:
    """Return the tokens that the request's parameters forbid after this history; `generated` is a count."""
    banned = set()
    for word in limits.bad_words:
        start = list(word[:-1])
        if not start or history[-len(start) :] == start:
            banned.add(word[-1])
    if generated < params.min_tokens:
        banned |= {*limits.end_ids, *params.stop_token_ids}
    if params.allowed_token_ids is not None:
        banned |= set(range(limits.vocab_size)) - set(params.allowed_token_ids)
    return banned


def shaped(values: Sequence[float], params: SamplingParams) -> list[float]:
    """Return the probabilities after temperature, top-k, top-p and min-p; they sum to 1."""
    peak = max(values)
    if params.temperature == 0:
        first = list(values).index(peak)
        return [float(token == first) for token in range(len(values))]
    weights = [math.exp((value - peak) / params.temperature) for value in values]
    kept = set(range(len(values)))
    if 0 < params.top_k < len(values):
        least = sorted(values, reverse=True)[params.top_k - 1]
        kept = {token for token in kept if values[token] >= least}
    if params.top_p < 1:
        total = math.fsum(weights[token] for token in kept)
        kept = {token for token in kept if mass_above(token, kept, values, weights) < params.top_p * total}
    kept = {token for token in kept if weights[token] >= params.min_p}
    total = math.fsum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(values))]


def mass_above(token: int, kept: set[int], values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weight of the kept tokens that are strictly more likely than this one."""
    return math.fsum(weights[other] for other in kept if values[other] > values[token])
