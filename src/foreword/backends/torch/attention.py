"""Attention over paged KV in plain torch: the reference that every kernel must equal."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreword.backends.batch import ForwardBatch
from foreword.backends.torch.staging import RequestGroup, StagedBatch


class LayerRows(Protocol):
    """Keys or values of one layer by physical row, [rows, kv heads, dim]: a tensor, or what looks like one."""

    def __getitem__(self, slots: Tensor, /) -> Tensor:
        """[..., kv heads, dim] for slots [...]."""
        ...

    def __setitem__(self, slots: Tensor, rows: Tensor, /) -> None:
        """Write them."""
        ...


@dataclass(frozen=True)
class GroupView:
    """What the rows of a group of requests look at during a pass; the same for every layer."""

    rows: Tensor  # int64 [requests, places], batch rows; the number of rows where a request has no more
    slots: Tensor  # int64 [requests, kv rows], physical rows in logical order
    visible: Tensor  # bool [requests, places, kv rows]


def group_views(staged: StagedBatch, page_size: int, empty_slot: int) -> list[GroupView]:
    """Turn block tables, prefix lengths and ancestor masks into gathers and masks.

    `empty_slot` stands for KV rows that a request does not have: it must hold numbers, no matter which.
    """
    return [_view(staged.batch, group, page_size, empty_slot) for group in staged.groups]


def _view(batch: ForwardBatch, group: RequestGroup, page_size: int, empty_slot: int) -> GroupView:
    device, num_rows = batch.token_ids.device, len(batch.token_ids)
    members = group.members.long()
    starts, ends = batch.row_starts[members].unsqueeze(1), batch.row_starts[members + 1].unsqueeze(1)
    rows = starts + torch.arange(group.places, device=device)
    logical = torch.arange(group.kv_rows, device=device)
    pages = batch.block_tables[members][:, logical // page_size].long()
    slots = pages * page_size + logical % page_size
    read = rows.clamp(max=num_rows - 1)
    return GroupView(
        rows=torch.where(rows < ends, rows, num_rows),
        slots=torch.where(logical < batch.kv_lens[members].unsqueeze(1), slots, empty_slot),
        visible=_visible(batch.prefix_lens[read], batch.ancestor_masks[read], logical),
    )


def _visible(prefix_lens: Tensor, masks: Tensor, logical: Tensor) -> Tensor:
    """Which logical KV rows each row sees: prefix_lens [...], masks [..., words] -> bool [..., kv rows]."""
    behind = logical - prefix_lens.long().unsqueeze(-1)  # [..., kv rows]; < 0 inside the prefix
    word, bit = behind.clamp(min=0) // 64, behind.clamp(min=0) % 64
    in_reach = (behind >= 0) & (word < masks.shape[-1])
    words = masks.gather(-1, word.clamp(max=masks.shape[-1] - 1))
    return (behind < 0) | (in_reach & ((words >> bit) & 1).bool())


def paged_attention(queries: Tensor, keys: LayerRows, values: LayerRows, views: list[GroupView]) -> Tensor:
    """Softmax attention of every row over the KV rows that it sees; 0 for rows of no request.

    queries [rows, heads, dim]; keys, values [physical rows, kv heads, dim]; returns [rows, heads, dim].
    """
    num_rows = len(queries)
    attended = queries.new_zeros((num_rows + 1, *queries.shape[1:]))  # the last takes what belongs to no row
    for view in views:
        attended[view.rows] = scaled_dot_product_attention(
            queries[view.rows.clamp(max=num_rows - 1)].transpose(1, 2),  # [requests, heads, places, dim]
            keys[view.slots].transpose(1, 2),  # [requests, kv heads, kv rows, dim]
            values[view.slots].transpose(1, 2),
            attn_mask=view.visible.unsqueeze(1),
            enable_gqa=True,
        ).transpose(1, 2)
    return attended[:num_rows]
