"""The coupled rule: the target draws its own token at every node; a guess is right if it is that token.

The token at absolute position t is argmax_v(logit_v / temperature + G(seed, sample, t, v)), so the
text is a function of prompt, parameters, seed and sample index alone, whatever was guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.acceptance.noise import gumbel


@dataclass(frozen=True)
class DrawKey:
    """What a request's draws depend on besides logits and position."""

    temperature: float  # 0: the largest logit
    seed: int  # unsigned 64 bits
    sample: int  # which of a request's n answers


@dataclass(frozen=True)
class DrawRow:
    """One draw."""

    key: DrawKey
    position: int  # absolute position of the token to be drawn


def draw(logits: Tensor, rows: Sequence[DrawRow]) -> Tensor:
    """The target's own token for every row of logits [rows, vocab]: int64 [rows]."""
    chosen = logits.argmax(dim=-1)
    sampled = [index for index, row in enumerate(rows) if row.key.temperature > 0]
    if not sampled:
        return chosen
    device = logits.device
    temperature = torch.tensor(
        [[rows[i].key.temperature] for i in sampled], dtype=torch.float64, device=device
    )
    keys = [[_as_int64(rows[i].key.seed), rows[i].key.sample, rows[i].position] for i in sampled]
    seed, sample, position = torch.tensor(keys, dtype=torch.int64, device=device).unsqueeze(-1).unbind(1)
    token = torch.arange(logits.shape[1], device=device)
    noise = gumbel((seed, sample, position, token))  # [sampled, vocab]
    chosen[sampled] = (logits[sampled].double() / temperature + noise).argmax(dim=-1)
    return chosen


def follow(drawn: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[int], int]:
    """The path of nodes that the draws walk, and the draw that leaves the tree.

    `drawn` has the draw after the committed prefix first, then the one after each node.
    """
    child = {(parent, token): node for node, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
    path: list[int] = []
    node = -1
    while (following := child.get((node, drawn[node + 1]))) is not None:
        path.append(following)
        node = following
    return path, drawn[node + 1]


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
