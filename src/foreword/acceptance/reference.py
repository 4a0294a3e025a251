"""Slow reference of acceptance for single rows, in plain Python: noise, rules and sampling pipeline."""

import math
from collections.abc import Callable, Sequence, Set

import numpy as np

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import TokenLimits

WORD = (1 << 64) - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def row_key(seed: int, sample: int, stream: int, nonce: int, position: int, branch: int = 0) -> int:
    """Return the key of one row; `branch` distinguishes rows at one position."""
    key = 0
    for word in (seed, sample, stream, nonce, position, *([branch] if branch else [])):
        key = mix(((key + 0x9E3779B97F4A7C15) & WORD) ^ word)
    return key


def bits(key: int, token: int) -> int:
    return mix((key + (token + 1) * 0x9E3779B97F4A7C15) & WORD)


def gumbel(key: int, token: int) -> float:
    units = (bits(key, token) >> 10) | 1
    if units < 1 << 53:
        return -math.log(-math.log(units * 2.0**-54))
    return -math.log(-math.log1p(-((1 << 54) - units) * 2.0**-54))


def uniform(key: int) -> float:
    """Return a uniform in the open interval (0, 1)."""
    return min(((bits(key, 0) >> 10) | 1) * 2.0**-54, 1 - 2.0**-53)


Row = Sequence[float]


def draw(weights: Row, key: int) -> int:
    """Return the token with the largest log weight + noise."""
    scores = [math.log(w) + gumbel(key, token) if w > 0 else -math.inf for token, w in enumerate(weights)]
    return scores.index(max(scores))


def coupled(
    next_token: Callable[[list[int]], int], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], int]:
    """Return accepted nodes and own token; `next_token` draws after a list of draft tokens like plain decoding."""
    path: list[int] = []
    while True:
        drawn = next_token([tokens[node] for node in path])
        parent = path[-1] if path else -1
        children = [n for n, p in enumerate(parents) if p == parent and tokens[n] == drawn]
        if not children:
            return path, drawn
        path.append(children[0])


def token_acceptance(p: Sequence[Row], q: Sequence[Row], tokens: Sequence[int]) -> list[float]:
    """Return each node's acceptance probability, given that the nodes before it are accepted."""
    return [min(1.0, p[i][x] / q[i][x]) for i, x in enumerate(tokens)]


def token_stop(accept: Sequence[float], uniforms: Sequence[float]) -> int:
    """Return the number of accepted nodes."""
    for count, (chance, u) in enumerate(zip(accept, uniforms, strict=True)):
        if u >= chance:
            return count
    return len(accept)


def block_acceptance(
    p: Sequence[Row], q: Sequence[Row], tokens: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return the acceptance probability per prefix, and the carried weight per length (including 0)."""
    carried = [1.0]
    for i, x in enumerate(tokens):
        carried.append(min(1.0, carried[-1] * p[i][x] / q[i][x]))
    accept = []
    for length in range(1, len(tokens)):
        spare = sum(residual(p[length], q[length], carried[length]))
        bottom = spare + 1 - carried[length]
        accept.append(spare / bottom if bottom > 0 else 0.0)
    return accept + carried[-1:] * bool(tokens), carried


def block_stop(accept: Sequence[float], uniforms: Sequence[float]) -> int:
    return max([0, *(i + 1 for i, a in enumerate(accept) if uniforms[i] < a)])


def residual(p: Row, q: Row, scale: float = 1.0) -> list[float]:
    """Return the target's probabilities minus the draft's, clipped at 0, not normalised."""
    return [max(scale * a - b, 0.0) for a, b in zip(p, q, strict=True)]


def traversal(
    p: Sequence[Row],
    q: Sequence[Row],
    tokens: Sequence[int],
    parents: Sequence[int],
    uniforms: Sequence[float],
) -> tuple[list[int], list[float]]:
    """Return accepted nodes, and the distribution of the own token.

    p starts with the root's row. q and uniforms belong to the nodes; each q is conditional on the nodes before: equal
    for siblings drawn with replacement, without the earlier ones if drawn without.
    """

    def visit(node: int, carried: float) -> tuple[list[int], list[float]] | None:
        own = list(p[node + 1])
        for child in (n for n, parent in enumerate(parents) if parent == node):
            ratio = own[tokens[child]] / q[child][tokens[child]]
            found = visit(child, min(1.0, carried * ratio))
            if found is not None:
                return [child, *found[0]], found[1]
            left = residual(own, q[child], carried)
            spare = sum(left)
            if spare == 0:
                carried = 1.0 if carried == 1 else 0.0
                continue
            own, carried = [weight / spare for weight in left], spare / (spare + (1 - carried))
        accepted = node == -1 or uniforms[node] < carried
        return ([], own) if accepted else None

    found = visit(-1, 1.0)
    assert found is not None
    return found


NEVER = -math.inf


def corrected(
    logits: Sequence[float],
    params: SamplingParams,
    limits: TokenLimits,
    prompt: Sequence[int],
    generated: Sequence[int],
    allowed: Set[int] | None = None,
) -> list[float]:
    """Apply bias, penalties, bad words, minimum length and allowed tokens, with the row's own history."""
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
    return [float(np.float32(value)) for value in values]


def penalised(value: float, params: SamplingParams, times: int) -> float:
    """Return a seen token's logit after the three penalties."""
    value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    value -= params.frequency_penalty * times
    return value - (params.presence_penalty if times else 0.0)


def forbidden(params: SamplingParams, limits: TokenLimits, history: list[int], generated: int) -> set[int]:
    """Return the tokens that must not come next."""
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
    """Apply temperature, top-k, top-p and min-p; return probabilities that sum to 1."""
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
        kept = {t for t in kept if mass_above(t, kept, values, weights) < params.top_p * total}
    kept = {token for token in kept if weights[token] >= params.min_p}
    total = math.fsum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(values))]


def mass_above(token: int, kept: set[int], values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weight of the kept tokens that are strictly more likely than this one."""
    return math.fsum(weights[other] for other in kept if values[other] > values[token])


def probabilities(
    logits: Sequence[float],
    params: SamplingParams,
    limits: TokenLimits,
    prompt: Sequence[int],
    generated: Sequence[int],
    allowed: Set[int] | None = None,
) -> list[float]:
    """Return the distribution of the next token; `allowed` are the grammar's tokens, None: all."""
    return shaped(corrected(logits, params, limits, prompt, generated, allowed), params)
