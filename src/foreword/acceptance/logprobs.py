"""Log probabilities for users: of the raw model, before temperature and any correction, as OpenAI's API has them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement, Verdicts
from foreword.acceptance.chains import exact_sums
from foreword.acceptance.trees import Floats, Ints


@dataclass(frozen=True)
class TokenLogprobs:
    """One committed token's log probability, and those of the most likely tokens at its position."""

    token: int
    logprob: float
    top_ids: Ints  # [wanted], most likely first
    top_logprobs: Floats  # [wanted]


def request_logprobs(judged: Judgement, verdicts: Verdicts, request: int) -> list[TokenLogprobs]:
    """For each committed token of a request (accepted nodes, then its own), in order; `judged.logits` are raw."""
    trees = judged.trees
    root = int(trees.roots[request])
    nodes = [root + 1 + node for node in verdicts.path(request)]
    tokens = [int(trees.tokens[node]) for node in nodes]
    rows = [root, *nodes]
    if verdicts.own_tokens[request] >= 0:
        tokens.append(int(verdicts.own_tokens[request]))
    wanted = int(judged.records["logprobs"][request])
    return rows_logprobs(judged.logits, rows[: len(tokens)], tokens, wanted)


def rows_logprobs(logits: Tensor, rows: list[int], tokens: list[int], wanted: int) -> list[TokenLogprobs]:
    """Log-softmax of the given rows at a token each, and at their `wanted` largest entries."""
    values = logits[rows].double()
    peak = values.amax(dim=-1, keepdim=True)
    flat = (values - peak).exp()
    row = torch.arange(len(rows), device=logits.device).repeat_interleave(logits.shape[1])
    normaliser = peak[:, 0] + exact_sums(row, flat.flatten(), len(rows)).log()
    logprobs = values - normaliser[:, None]
    top = logprobs.topk(wanted, dim=-1)
    own = logprobs[torch.arange(len(rows)), tokens]
    columns = (own.cpu().numpy(), top.indices.cpu().numpy(), top.values.cpu().numpy())
    return [
        TokenLogprobs(tokens[i], float(columns[0][i]), np.array(columns[1][i]), np.array(columns[2][i]))
        for i in range(len(tokens))
    ]
