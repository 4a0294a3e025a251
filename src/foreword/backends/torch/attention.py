"""Attention over paged KV in plain torch: the reference that all kernels are tested against."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreword.backends.batch import SHARE_PART, ForwardBatch
from foreword.backends.interface import HeadInput
from foreword.backends.torch.staging import RequestGroup, StagedBatch


class LayerRows(Protocol):
    """Keys or values of one layer by physical row, [rows, kv heads, dim]."""

    def __getitem__(self, slots: Tensor, /) -> Tensor:
        """Return [..., kv heads, dim] for slots [...]."""

    def __setitem__(self, slots: Tensor, rows: Tensor, /) -> None:
        """Write rows."""


@dataclass(frozen=True)
class GroupView:
    """Visible KV rows of a group of requests during a pass, equal for all layers."""

    rows: Tensor  # int64 [requests, query rows], rows of the batch; padded with the number of rows
    slots: Tensor  # int64 [requests, kv rows], physical rows in logical order
    visible: Tensor  # bool [requests, query rows, kv rows], whether a row attends to a KV row


@dataclass(frozen=True)
class PagedKv:
    """Keys and values of one layer during a pass."""

    keys: LayerRows
    values: LayerRows
    slots: Tensor  # int64 [rows], physical rows to write
    views: list[GroupView]  # rows to read, by group of requests
    shares: Tensor | None = (
        None  # float32 [rows, parts], to which `add_shares` adds; None: they are not wanted
    )


def group_views(staged: StagedBatch, page_size: int, empty_slot: int) -> list[GroupView]:
    """Convert block tables, prefix lengths and ancestor masks into slots to gather and boolean masks.

    `empty_slot` is read in place of missing KV rows, so its contents must be finite.
    """
    return [_view(staged.batch, group, page_size, empty_slot) for group in staged.groups]


def _view(batch: ForwardBatch, group: RequestGroup, page_size: int, empty_slot: int) -> GroupView:
    device, num_rows = batch.token_ids.device, len(batch.token_ids)
    members = group.members.long()
    starts, ends = batch.row_starts[members].unsqueeze(1), batch.row_starts[members + 1].unsqueeze(1)
    rows = starts + torch.arange(group.query_rows, device=device)
    logical = torch.arange(group.kv_rows, device=device)
    pages = batch.block_tables[members][:, logical // page_size].long()
    slots = pages * page_size + logical % page_size
    clamped_rows = rows.clamp(max=num_rows - 1)
    return GroupView(
        rows=torch.where(rows < ends, rows, num_rows),
        slots=torch.where(logical < batch.kv_lens[members].unsqueeze(1), slots, empty_slot),
        visible=_visible(batch.prefix_lens[clamped_rows], batch.ancestor_masks[clamped_rows], logical),
    )


def _visible(prefix_lens: Tensor, masks: Tensor, logical: Tensor) -> Tensor:
    """Return which logical KV rows are visible, bool [..., kv rows], for prefix_lens [...] and masks [..., words]."""
    draft_index = logical - prefix_lens.long().unsqueeze(-1)  # [..., kv rows]; negative inside the prefix
    word, bit = draft_index.clamp(min=0) // 64, draft_index.clamp(min=0) % 64
    in_masks = (draft_index >= 0) & (word < masks.shape[-1])
    words = masks.gather(-1, word.clamp(max=masks.shape[-1] - 1))
    return (draft_index < 0) | (in_masks & ((words >> bit) & 1).bool())


def windowed(views: list[GroupView], window: int | None, empty_slot: int) -> list[GroupView]:
    """Restrict views to the newest `window` positions; None: return them as they are.

    A row attends to the positions from 0 to its own, in order, also in a tree. So its newest positions are its last
    visible KV rows. The slots of KV rows that no row attends to are replaced, since their pages may be freed.
    """
    if window is None:
        return views
    narrow = []
    for view in views:
        rank = view.visible.cumsum(dim=-1)
        visible = view.visible & (rank > rank[..., -1:] - window)
        slots = torch.where(visible.any(dim=1), view.slots, empty_slot)
        narrow.append(replace(view, slots=slots, visible=visible))
    return narrow


def views_from_start(
    head_input: HeadInput, staged: StagedBatch, views: list[GroupView], empty_slot: int
) -> list[GroupView]:
    """Return the views without the KV rows before each request's start, which are unwritten and may contain NaN."""
    device = staged.batch.token_ids.device
    starts = torch.zeros(len(staged.batch.kv_lens), dtype=torch.int64, device=device)
    starts[: len(head_input.starts)] = torch.from_numpy(head_input.starts).to(device)
    masked = []
    for view, group in zip(views, staged.groups, strict=True):
        logical = torch.arange(view.visible.shape[-1], device=device)
        is_after_start = logical >= starts[group.members.long()][:, None]
        slots = torch.where(is_after_start, view.slots, empty_slot)
        masked.append(replace(view, slots=slots, visible=view.visible & is_after_start.unsqueeze(1)))
    return masked


def paged_attention(
    queries: Tensor,
    keys: LayerRows,
    values: LayerRows,
    views: list[GroupView],
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax attention of every row over its visible KV rows; 0 for padding rows.

    queries [rows, heads, dim]; keys, values [physical rows, kv heads, dim]; returns [rows, heads, dim]. Scores are
    multiplied by `scale` (None: 1 / sqrt(dim)), then soft-capped. `sinks` are one more score per head, which
    belongs to no position.
    """
    num_rows = len(queries)
    attended = queries.new_zeros((num_rows + 1, *queries.shape[1:]))  # the last row takes padding
    for view in views:
        # [requests, heads, query rows, dim]
        heads = queries[view.rows.clamp(max=num_rows - 1)].transpose(1, 2)
        # [requests, kv heads, kv rows, dim]
        kv = keys[view.slots].transpose(1, 2), values[view.slots].transpose(1, 2)
        if softcap is not None or sinks is not None:
            result = _explicit_attention(heads, *kv, view.visible, scale, softcap, sinks)
        else:
            result = scaled_dot_product_attention(
                heads, *kv, attn_mask=view.visible.unsqueeze(1), scale=scale, enable_gqa=True
            )
        attended[view.rows] = result.transpose(1, 2)
    return attended[:num_rows]


def add_shares(
    shares: Tensor,
    queries: Tensor,
    keys: LayerRows,
    view: GroupView,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Add the shares of attention that go to each part of the KV rows; queries [rows, heads, dim], one row per request.

    `shares` is [rows, parts]; `ForwardOutput.shares` describes them.
    """
    rows = view.rows[:, 0].clamp(max=len(queries) - 1)
    found = keys[view.slots]  # [requests, kv rows, kv heads, dim]
    heads = queries[rows].view(
        len(rows), found.shape[2], -1, queries.shape[2]
    )  # [requests, kv heads, heads of each, dim]
    scores = torch.einsum("rkgd,rnkd->rkgn", heads, found) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~view.visible[:, 0, None, None]
    weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num().sum((1, 2))
    parts = torch.arange(weights.shape[1], device=weights.device) // SHARE_PART
    by_part = weights.new_zeros(len(rows), shares.shape[1]).index_add_(1, parts, weights)
    shares.index_add_(0, rows, by_part * (view.rows < len(queries)))


def _explicit_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention with soft-capped scores or sinks, which torch's function does not support."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = queries @ keys.transpose(2, 3) * (queries.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
    if sinks is not None:
        sink_scores = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat((scores, sink_scores), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype)
    return weights[..., : values.shape[2]] @ values
