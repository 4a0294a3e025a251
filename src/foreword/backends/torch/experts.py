"""Mixture of experts in plain torch: each expert processes its routed rows, and is read once per pass."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from foreword.backends.torch.weights import ExpertWeights
from foreword.models.config import CLAMPED_SLOPE, ExpertsSpec, GroupScore, Scores

Activation = Callable[[Tensor], Tensor]


def route(spec: ExpertsSpec, weights: ExpertWeights, normed: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's experts, int64 [rows, per token], and their weights, float32. Ties go to the lower index."""
    logits = linear(normed.float(), weights.router, weights.router_bias)
    scores = logits.softmax(dim=-1) if spec.scores is Scores.SOFTMAX else logits.sigmoid()
    choice = scores if weights.correction is None else scores + weights.correction
    chosen = _best(_in_best_groups(spec, choice), spec.per_token)
    share = scores.gather(1, chosen)
    if spec.normalize:
        share = share / (share.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen, share * spec.scale


def mixture(spec: ExpertsSpec, weights: ExpertWeights, normed: Tensor, activation: Activation) -> Tensor:
    """Return the routed experts' output, [rows, hidden]."""
    chosen, share = route(spec, weights, normed)
    experts = chosen.flatten()
    order = experts.argsort(stable=True)
    rows = order // spec.per_token
    read = normed[rows]
    outputs = torch.empty_like(read)
    start = 0
    for expert, count in enumerate(experts.bincount(minlength=spec.count).tolist()):
        here = slice(start, start + count)
        if count:
            bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert]
            inner = linear(read[here], weights.gate_up[expert], bias)
            if inner.shape[1] == spec.size:  # no gate
                active = activation(inner)
            else:
                gate, up = inner.chunk(2, dim=-1)
                active = activation(gate) * up if spec.clamp is None else _clamped(gate, up, spec.clamp)
            bias = None if weights.down_bias is None else weights.down_bias[expert]
            outputs[here] = linear(active, weights.down[expert], bias)
        start += count
    weighed = (outputs * share.flatten()[order].unsqueeze(1)).to(normed.dtype)
    return torch.zeros_like(normed).index_add_(0, rows, weighed)


def _clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * CLAMPED_SLOPE))


def _best(scores: Tensor, count: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(spec: ExpertsSpec, choice: Tensor) -> Tensor:
    """Return the scores, with -inf outside a row's best groups."""
    if spec.groups == 1:
        return choice
    grouped = choice.view(len(choice), spec.groups, -1)
    counted = 1 if spec.group_score is GroupScore.MAX else 2
    worth = grouped.topk(counted, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, _best(worth, spec.top_groups), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
