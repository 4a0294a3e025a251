"""Routing: selects every row's experts and sorts rows by expert, on the device.

The grid of the experts' products is fixed by the number of rows and experts, so that passes can be captured; empty
blocks end at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.dependent_launch import begin_kernel, pdl_options
from foreword.backends.torch.weights import ExpertWeights
from foreword.kernels.launching import kernel
from foreword.models.config import ExpertsSpec, GroupScore, Scores

_CHUNK = 4096
"""(row, expert) pairs that one program processes together."""


@triton.jit
def _in_best_groups(choice, group, member, TOP_GROUPS: tl.constexpr, SUMMED: tl.constexpr):
    """Return the scores [groups, members], with -inf outside the TOP_GROUPS best groups.

    The score of a group is its best score or, with SUMMED 2, the sum of its two best scores.
    """
    lowest = -float("inf")
    group_score = tl.max(choice, axis=1)
    if SUMMED > 1:
        best = tl.argmax(choice, axis=1, tie_break_left=True)
        group_score += tl.max(tl.where(member[None, :] == best[:, None], lowest, choice), axis=1)
    is_best = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(group_score, axis=0, tie_break_left=True)
        is_best = is_best | (group == best)
        group_score = tl.where(group == best, lowest, group_score)
    return tl.where(is_best[:, None], choice, lowest)


@kernel(do_not_specialize=("num_rows", "spare_slot"))
def _route(
    logits, bias, correction, slots, chosen, shares, counts, num_rows, spare_slot, scale,
    EXPERTS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    MEMBERS: tl.constexpr, MEMBER_BLOCK: tl.constexpr, TOP_GROUPS: tl.constexpr, SUMMED: tl.constexpr,
    PER_TOKEN: tl.constexpr, PER_TOKEN_BLOCK: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    BIASED: tl.constexpr, CORRECTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Select one row's experts, best first and the lower number on ties, and compute their shares."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUP_BLOCK), tl.arange(0, MEMBER_BLOCK)
    expert = group[:, None] * MEMBERS + member[None, :]
    mask = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    logit = tl.load(logits + row * EXPERTS + expert, mask=mask, other=-float("inf"))
    for part in tl.static_range(1, PARTS):
        logit += tl.load(logits + (part * num_rows + row) * EXPERTS + expert, mask=mask, other=0.0)
    if BIASED:
        logit += tl.load(bias + expert, mask=mask, other=0.0)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        raised = tl.exp(logit - tl.max(tl.max(logit, axis=1), axis=0))
        scores = raised / tl.sum(tl.sum(raised, axis=1), axis=0)
    choice = tl.where(mask, scores, -float("inf"))
    if CORRECTED:
        choice += tl.load(correction + expert, mask=mask, other=0.0)
    if GROUPS > 1:
        choice = _in_best_groups(choice, group, member, TOP_GROUPS, SUMMED)
    ranks = tl.arange(0, PER_TOKEN_BLOCK)
    chosen_expert, share = tl.zeros((PER_TOKEN_BLOCK,), tl.int32), tl.zeros((PER_TOKEN_BLOCK,), tl.float32)
    for rank in tl.static_range(PER_TOKEN):
        highest = tl.max(tl.max(choice, axis=1), axis=0)
        # With NaN logits there is no maximum: the last expert is taken, and its weight is NaN too.
        best = tl.min(tl.min(tl.where(choice == highest, expert, EXPERTS - 1), axis=1), axis=0)
        score = tl.sum(tl.sum(tl.where(mask & (expert == best), scores, 0.0), axis=1), axis=0)
        chosen_expert = tl.where(ranks == rank, best, chosen_expert)
        share = tl.where(ranks == rank, score, share)
        choice = tl.where(expert == best, -float("inf"), choice)
    if NORMALIZE:
        share = share / (tl.sum(share, axis=0) + 1e-20)
    # Padding has no expert, so that no weights are read for it.
    chosen_expert = tl.where(tl.load(slots + row) == spare_slot, EXPERTS, chosen_expert)
    tl.store(chosen + row * PER_TOKEN + ranks, chosen_expert, mask=ranks < PER_TOKEN)
    tl.store(counts + row * PER_TOKEN + ranks, (chosen_expert < EXPERTS).to(tl.int32), mask=ranks < PER_TOKEN)
    tl.store(shares + row * PER_TOKEN + ranks, share * scale, mask=ranks < PER_TOKEN)


def route(
    logits: Tensor, weights: ExpertWeights[object], spec: ExpertsSpec, slots: Tensor, spare_slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the experts of every row, their shares (routing weights), and their counts, each [rows, per token].

    Experts and counts are int32, shares float32. `logits` are in parts, float32 [parts, rows, experts]. A count is 1.
    Rows that write to `spare_slot` (padding) have the expert number `spec.count`, which does not exist, and count 0.
    """
    parts, rows, experts = logits.shape
    chosen = torch.empty((rows, spec.per_token), dtype=torch.int32, device=logits.device)
    shares, counts = torch.empty_like(chosen, dtype=torch.float32), torch.empty_like(chosen)
    members, bias, correction = experts // spec.groups, weights.router_bias, weights.correction
    _route[(rows,)](
        logits, logits if bias is None else bias, logits if correction is None else correction, slots,
        chosen, shares, counts, rows, spare_slot, spec.scale,
        EXPERTS=experts, PARTS=parts, GROUPS=spec.groups, GROUP_BLOCK=triton.next_power_of_2(spec.groups),
        MEMBERS=members, MEMBER_BLOCK=triton.next_power_of_2(members), TOP_GROUPS=spec.top_groups,
        SUMMED=1 if spec.group_score is GroupScore.MAX else 2, PER_TOKEN=spec.per_token,
        PER_TOKEN_BLOCK=triton.next_power_of_2(spec.per_token), SIGMOID=spec.scores is Scores.SIGMOID,
        NORMALIZE=spec.normalize, BIASED=bias is not None, CORRECTED=correction is not None,
        num_warps=1, **pdl_options(slots),
    )  # fmt: skip
    return chosen, shares, counts


@dataclass(frozen=True)
class ExpertBlocks:
    """(row, expert) pairs sorted by expert, in blocks of one expert each.

    The number of a pair is row * per token + rank of the expert among the row's.
    """

    order: Tensor  # int32 [pairs], numbers of the pairs
    experts: Tensor  # int32 [blocks], the block's expert
    firsts: Tensor  # int32 [blocks], first index in `order`
    counts: Tensor  # int32 [blocks], at most `rows`; 0: the block is empty
    rows: int  # maximum pairs of a block


@kernel(do_not_specialize=("count", "num_blocks"))
def _sort(
    chosen, order, experts, firsts, counts, count, num_blocks,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sort the pairs of one expert and write its blocks. The program counts the pairs of lower experts itself."""
    begin_kernel(PDL)
    expert = tl.program_id(0)
    same, lower = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32)
    for begin in range(0, count, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        experts_of_pairs = tl.load(chosen + pair, mask=pair < count, other=EXPERTS)
        same += (experts_of_pairs == expert).to(tl.int32)
        lower += (experts_of_pairs < expert).to(tl.int32)
    num_pairs, pairs_before = tl.sum(same, axis=0), tl.sum(lower, axis=0)
    next_pair = pairs_before
    for begin in range(0, count, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        is_chosen = tl.load(chosen + pair, mask=pair < count, other=EXPERTS) == expert
        tl.store(order + next_pair + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1, pair, mask=is_chosen)
        next_pair += tl.sum(is_chosen.to(tl.int32), axis=0)
    # An upper bound of the lower experts' blocks, without counting them; never more blocks than pairs.
    block = tl.minimum(pairs_before, pairs_before // ROWS + expert)
    end = tl.minimum(next_pair, next_pair // ROWS + expert + 1)
    if expert == EXPERTS - 1:
        end = num_blocks
    for index in range(block, end):
        pairs_done = (index - block) * ROWS
        tl.store(experts + index, expert)
        tl.store(firsts + index, pairs_before + pairs_done)
        tl.store(counts + index, tl.maximum(tl.minimum(num_pairs - pairs_done, ROWS), 0))


def sort_by_expert(chosen: Tensor, count: int, rows: int) -> ExpertBlocks:
    """Return blocks of at most `rows` pairs of `chosen` int32 [rows, per token], for `count` experts."""
    pairs, device = chosen.numel(), chosen.device
    num_blocks, chunk = min(pairs, pairs // rows + count), min(_CHUNK, triton.next_power_of_2(pairs))
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    experts, firsts, counts = torch.empty((3, num_blocks), dtype=torch.int32, device=device)
    _sort[(count,)](
        chosen, order, experts, firsts, counts, pairs, num_blocks,
        EXPERTS=count, ROWS=rows, CHUNK=chunk, num_warps=8 if chunk > 1024 else 4, **pdl_options(chosen),
    )  # fmt: skip
    return ExpertBlocks(order, experts, firsts, counts, rows)
