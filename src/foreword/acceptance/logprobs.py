"""Log probabilities for users: of the raw model, before temperature and any correction, as OpenAI's API has them."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    rank: int  # 1: the most likely token
    top_ids: Ints  # [wanted], most likely first
    top_logprobs: Floats  # [wanted]


def request_logprobs(judged: Judgement, verdicts: Verdicts, request: int) -> list[TokenLogprobs]:
    """For each committed token of a request (accepted nodes, then its own), in order; none if it wants none."""
    wanted = int(judged.records["logprobs"][request])
    if wanted < 0:
        return []
    trees = judged.trees
    root = int(trees.roots[request])
    nodes = [root + 1 + node for node in verdicts.path(request)]
    return rows_logprobs(judged.logits, [root, *nodes], verdicts.tokens(trees, request), wanted)


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
    ranks = (logprobs > own[:, None]).sum(dim=-1) + 1
    found = zip(
        tokens,
        own.tolist(),
        ranks.tolist(),
        top.indices.cpu().numpy(),
        top.values.cpu().numpy(),
        strict=True,
    )
    return [TokenLogprobs(*columns) for columns in found]


def score(logits: Tensor, next_tokens: Sequence[int], wanted: int) -> list[TokenLogprobs]:
    raise NotImplementedError
