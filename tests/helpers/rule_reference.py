"""Slow references of noise and acceptance rules for single rows, in plain Python."""

import math
from collections.abc import Callable, Sequence

from foreword.acceptance.reference import WORD_MASK, mix


def row_key(seed: int, sample: int, stream: int, nonce: int, position: int, branch: int = 0) -> int:
    """Return the key of one row; `branch` distinguishes rows at one position."""
    key = 0
    for word in (seed, sample, stream, nonce, position, *([branch] if branch else [])):
        key = mix(((key + 0x9E3779B97F4A7C15) & WORD_MASK) ^ word)
    return key


def bits(key: int, token: int) -> int:
    return mix((key + (token + 1) * 0x9E3779B97F4A7C15) & WORD_MASK)


def gumbel(key: int, token: int) -> float:
    units = (bits(key, token) >> 10) | 1
    if units < 1 << 53:
        return -math.log(-math.log(units * 2.0**-54))
    return -math.log(-math.log1p(-((1 << 54) - units) * 2.0**-54))


def uniform(key: int) -> float:
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
