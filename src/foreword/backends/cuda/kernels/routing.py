"""Routing: selects every row's experts and sorts rows by expert, on the device.

The grid of the experts' products is fixed by the number of rows and experts, so that passes can be captured; empty
blocks end at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.ahead import (
    ahead,
    let_the_next_kernel_come,
    wait_for_the_kernel_before,
)
from foreword.backends.torch.weights import ExpertWeights
from foreword.kernels.launching import kernel
from foreword.models.config import ExpertsSpec, GroupScore, Scores

_CHUNK = 4096
"""(row, expert) pairs that one program processes together."""


@triton.jit
def _in_best_groups(choice, group, member, TOP_GROUPS: tl.constexpr, COUNTED: tl.constexpr):
    """Return the scores [groups, members], -inf outside the best groups."""
    lowest = -float("inf")
    worth = tl.max(choice, axis=1)
    if COUNTED > 1:
        best = tl.argmax(choice, axis=1, tie_break_left=True)
        worth += tl.max(tl.where(member[None, :] == best[:, None], lowest, choice), axis=1)
    kept = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(worth, axis=0, tie_break_left=True)
        kept = kept | (group == best)
        worth = tl.where(group == best, lowest, worth)
    return tl.where(kept[:, None], choice, lowest)


@kernel(do_not_specialize=("num_rows", "spare_slot"))
def _route(
    logits, bias, correction, slots, chosen, shares, counts, num_rows, spare_slot, scale,
    EXPERTS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    MEMBERS: tl.constexpr, MEMBER_BLOCK: tl.constexpr, TOP_GROUPS: tl.constexpr, COUNTED: tl.constexpr,
    TAKEN: tl.constexpr, TAKEN_BLOCK: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    BIASED: tl.constexpr, CORRECTED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Select one row's experts, best first, the lower number on ties, and their weights."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUP_BLOCK), tl.arange(0, MEMBER_BLOCK)
    expert = group[:, None] * MEMBERS + member[None, :]
    there = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    logit = tl.load(logits + row * EXPERTS + expert, mask=there, other=-float("inf"))
    for part in tl.static_range(1, PARTS):
        logit += tl.load(logits + (part * num_rows + row) * EXPERTS + expert, mask=there, other=0.0)
    if BIASED:
        logit += tl.load(bias + expert, mask=there, other=0.0)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        raised = tl.exp(logit - tl.max(tl.max(logit, axis=1), axis=0))
        scores = raised / tl.sum(tl.sum(raised, axis=1), axis=0)
    choice = tl.where(there, scores, -float("inf"))
    if CORRECTED:
        choice += tl.load(correction + expert, mask=there, other=0.0)
    if GROUPS > 1:
        choice = _in_best_groups(choice, group, member, TOP_GROUPS, COUNTED)
    place = tl.arange(0, TAKEN_BLOCK)
    taken, share = tl.zeros((TAKEN_BLOCK,), tl.int32), tl.zeros((TAKEN_BLOCK,), tl.float32)
    for rank in tl.static_range(TAKEN):
        highest = tl.max(tl.max(choice, axis=1), axis=0)
        # With NaN logits there is no maximum: the last expert is taken, and its weight is NaN too.
        found = tl.min(tl.min(tl.where(choice == highest, expert, EXPERTS - 1), axis=1), axis=0)
        own = tl.sum(tl.sum(tl.where(there & (expert == found), scores, 0.0), axis=1), axis=0)
        taken, share = tl.where(place == rank, found, taken), tl.where(place == rank, own, share)
        choice = tl.where(expert == found, -float("inf"), choice)
    if NORMALIZE:
        share = share / (tl.sum(share, axis=0) + 1e-20)
    # Padding has no expert, so that no weights are read for it.
    taken = tl.where(tl.load(slots + row) == spare_slot, EXPERTS, taken)
    tl.store(chosen + row * TAKEN + place, taken, mask=place < TAKEN)
    tl.store(counts + row * TAKEN + place, (taken < EXPERTS).to(tl.int32), mask=place < TAKEN)
    tl.store(shares + row * TAKEN + place, share * scale, mask=place < TAKEN)


def route(
    logits: Tensor, weights: ExpertWeights[object], spec: ExpertsSpec, slots: Tensor, spare_slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the experts of every row, int32 [rows, per token], their weights, float32, and 1 for each, int32.

    `logits` are in parts, float32 [parts, rows, experts]. Rows that write to `spare_slot` (padding) get the expert
    number `spec.count`, which does not exist, and 0.
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
        COUNTED=1 if spec.group_score is GroupScore.MAX else 2, TAKEN=spec.per_token,
        TAKEN_BLOCK=triton.next_power_of_2(spec.per_token), SIGMOID=spec.scores is Scores.SIGMOID,
        NORMALIZE=spec.normalize, BIASED=bias is not None, CORRECTED=correction is not None,
        num_warps=1, **ahead(slots),
    )  # fmt: skip
    return chosen, shares, counts


@dataclass(frozen=True)
class ExpertBlocks:
    """(row, expert) pairs sorted by expert, in blocks of one expert each.

    A pair is row * per token + rank of the expert.
    """

    order: Tensor  # int32 [pairs]
    experts: Tensor  # int32 [blocks]
    firsts: Tensor  # int32 [blocks], first index in `order`
    counts: Tensor  # int32 [blocks], at most `rows`; 0: the block is empty
    rows: int  # of a block


@kernel(do_not_specialize=("count", "num_blocks"))
def _sort(
    chosen, order, experts, firsts, counts, count, num_blocks,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Sort the pairs of one expert and write its blocks; it counts the pairs of earlier experts itself."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    expert = tl.program_id(0)
    own, before = 0, 0
    for begin in range(0, count, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        taken = tl.load(chosen + pair, mask=pair < count, other=EXPERTS)
        own += tl.sum((taken == expert).to(tl.int32), axis=0)
        before += tl.sum((taken < expert).to(tl.int32), axis=0)
    place = before
    for begin in range(0, count, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        mine = tl.load(chosen + pair, mask=pair < count, other=EXPERTS) == expert
        tl.store(order + place + tl.cumsum(mine.to(tl.int32), axis=0) - 1, pair, mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)
    # An upper bound without counting other experts' blocks, and never more blocks than pairs.
    block = tl.minimum(before, before // ROWS + expert)
    end = tl.minimum(place, place // ROWS + expert + 1)
    if expert == EXPERTS - 1:
        end = num_blocks
    for empty in range(block, end):
        done = (empty - block) * ROWS
        tl.store(experts + empty, expert)
        tl.store(firsts + empty, before + done)
        tl.store(counts + empty, tl.maximum(tl.minimum(own - done, ROWS), 0))


def sort_by_expert(chosen: Tensor, count: int, rows: int) -> ExpertBlocks:
    """Return blocks of at most `rows` pairs of `chosen` int32 [rows, per token], for `count` experts."""
    pairs, device = chosen.numel(), chosen.device
    num_blocks, chunk = min(pairs, pairs // rows + count), min(_CHUNK, triton.next_power_of_2(pairs))
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    experts, firsts, counts = torch.empty((3, num_blocks), dtype=torch.int32, device=device)
    _sort[(count,)](
        chosen, order, experts, firsts, counts, pairs, num_blocks,
        EXPERTS=count, ROWS=rows, CHUNK=chunk, num_warps=8 if chunk > 1024 else 4, **ahead(chosen),
    )  # fmt: skip
    return ExpertBlocks(order, experts, firsts, counts, rows)
