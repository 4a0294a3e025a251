"""Mixture of experts in plain torch. Each expert computes all its rows at once, so its weights are read only once."""

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
    inputs = normed[rows]
    outputs = torch.empty_like(inputs)
    start = 0
    for expert, count in enumerate(experts.bincount(minlength=spec.count).tolist()):
        pairs = slice(start, start + count)
        if count:
            bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert]
            inner = linear(inputs[pairs], weights.gate_up[expert], bias)
            if inner.shape[1] == spec.size:  # no gate
                active = activation(inner)
            else:
                gate, up = inner.chunk(2, dim=-1)
                active = activation(gate) * up if spec.clamp is None else _clamped(gate, up, spec.clamp)
            bias = None if weights.down_bias is None else weights.down_bias[expert]
            outputs[pairs] = linear(active, weights.down[expert], bias)
        start += count
    weighted = (outputs * share.flatten()[order].unsqueeze(1)).to(normed.dtype)
    return torch.zeros_like(normed).index_add_(0, rows, weighted)


def _clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return gpt-oss's clamped activation of gate and up."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * CLAMPED_SLOPE))


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of each row's best scores, best first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(spec: ExpertsSpec, choice: Tensor) -> Tensor:
    """Return the scores, with -inf for experts outside a row's best groups."""
    if spec.groups == 1:
        return choice
    grouped = choice.view(len(choice), spec.groups, -1)
    counted = 1 if spec.group_score is GroupScore.MAX else 2
    group_scores = grouped.topk(counted, dim=-1).values.sum(dim=-1)
    is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(
        1, _best(group_scores, spec.top_groups), True
    )
    return grouped.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(1)
